// One small box of words for the whole page: beside a piece of the pipeline, or of whatever has data-tip.

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

for (const element of document.querySelectorAll("[data-tip]")) {
  const lines = element.dataset.tip.split("\n");
  element.querySelector("title")?.remove(); // else the browser shows its own as well
  element.removeAttribute("title");
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
