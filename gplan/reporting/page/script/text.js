// Seconds as the rest of gplan writes them: three digits and a unit.

const SCALES = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]];

function threeDigits(value) {
  const size = Math.abs(value);
  return value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

function secondsText(seconds) {
  if (seconds === 0) return "0 s";
  const [unit, scale] = SCALES.find(([, one]) => Math.abs(seconds) >= 0.9995 * one) || SCALES[2];
  return `${threeDigits(seconds / scale)} ${unit}`;
}

function percentText(share) {
  return `${share < 0 ? "−" : "+"}${Math.abs(100 * share).toFixed(1)} %`;
}
