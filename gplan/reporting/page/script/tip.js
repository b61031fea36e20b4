// One small box of words for the whole page: beside a piece of the pipeline, a layer, a stage or a mark of a chart.

const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);

// Lines of text near a point of the window, kept inside of it; the first line is the heading.
function showTip(lines, x, y) {
  tip.replaceChildren(...lines.map((line, i) => {
    const row = document.createElement(i ? "div" : "strong");
    row.textContent = line;
    return row;
  }));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.max(6, Math.min(x + 14, document.documentElement.clientWidth - width - 6));
  const top = y + height + 22 > window.innerHeight ? y - height - 12 : y + 16;
  tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(Math.max(6, top))}px)`;
}

function hideTip() {
  tip.hidden = true;
}

// A title in the page is what browsers show by themselves, later and smaller; the box takes its place.
for (const element of document.querySelectorAll(".strip [title], .point")) {
  const title = element.querySelector("title");
  const lines = (title ? title.textContent : element.title).split("\n");
  title?.remove();
  element.removeAttribute("title");
  element.setAttribute("aria-description", lines.join(", "));
  element.addEventListener("pointermove", (event) => showTip(lines, event.clientX, event.clientY));
  element.addEventListener("pointerleave", hideTip);
  element.addEventListener("blur", hideTip);
  element.addEventListener("focus", () => {
    if (!element.matches(":focus-visible")) return;
    const box = element.getBoundingClientRect();
    showTip(lines, box.left + box.width / 2, box.bottom - 10);
  });
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
});
window.addEventListener("scroll", hideTip, { passive: true });
