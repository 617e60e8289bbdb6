// How numbers are written: as in the reports, with real minus signs and as many digits as mean something.

export const NOTHING = "–";

export function minus(text) {
  return text.replace(/-(?=[\d.])/g, "−");
}

// As Python rounds: a tie that is exact goes to the even digit, so that the page says what the sentences say.
function fixed(value, digits) {
  const scale = 10 ** digits;
  const floor = Math.floor(value * scale);
  if (value * scale - floor !== 0.5) return value.toFixed(digits);
  return ((floor + (floor % 2 ? 1 : 0)) / scale).toFixed(digits);
}

// A number in few characters, the same count of significant digits at every size.
export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NOTHING;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-4) {
    const [mantissa, power] = value.toExponential(digits - 1).split("e");
    return minus(`${Number(mantissa)}e${Number(power)}`);
  }
  if (size >= 1e4) return minus(`${(value / 1e3).toFixed(size >= 1e5 ? 0 : 1)}k`);
  if (Number.isInteger(value)) return minus(String(value));
  return minus(String(Number(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(size)))))));
}

export function percent(share, digits = 1) {
  if (share === null || share === undefined) return NOTHING;
  return minus(`${fixed(100 * share, digits).replace(/^-(?=0(?:\.0*)?$)/, "")}%`);
}

// A value of a metric with its unit: shares as per cent.
export function amount(value, isShare, digits = 1) {
  return isShare ? percent(value, digits) : number(value);
}

export function difference(value, isShare) {
  if (value === null || value === undefined) return NOTHING;
  const text = isShare ? fixed(100 * value, 1) : Number(value.toPrecision(3)).toString();
  return minus(value >= 0 ? `+${text}` : text);
}

export function count(value) {
  if (value === null || value === undefined) return NOTHING;
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  return value >= 1e4 ? `${(value / 1e3).toFixed(1)}k` : String(Math.round(value));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NOTHING;
  const whole = Math.round(seconds);
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (whole < 60) return `${seconds < 10 ? seconds.toFixed(1) : whole} s`;
  if (whole < 3600 && whole % 60 === 0) return `${whole / 60} min`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  const minutes = String(Math.floor((whole % 3600) / 60)).padStart(2, "0");
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${minutes} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function hours(value) {
  if (value === null || value === undefined) return NOTHING;
  return value < 0.1 ? `${(60 * value).toFixed(1)} min` : `${value.toFixed(value < 10 ? 1 : 0)} h`;
}

export function ago(unix) {
  if (!unix) return NOTHING;
  const seconds = Math.max(0, Date.now() / 1000 - unix);
  if (seconds < 10) return "just now";
  for (const [word, size] of Object.entries({day: 86400, hour: 3600, minute: 60, second: 1})) {
    const many = Math.floor(seconds / size);
    if (many >= 1) return `${many} ${word}${many > 1 ? "s" : ""} ago`;
  }
  return NOTHING;
}

export function clock(unix) {
  return new Date(1000 * unix).toLocaleString(undefined, {dateStyle: "medium", timeStyle: "short"});
}

// Return the least and the greatest of the values that are known; null where none is.
export function extent(values) {
  const known = values.filter(Number.isFinite);
  return known.length ? [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))] : null;
}

export function plural(many, word) {
  return `${many} ${word}${many === 1 ? "" : "s"}`;
}

// Ticks at 1, 2, 2.5, 5 × 10^n.
export function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  const steps = [1, 2, 2.5, 5].map((factor) => factor * power);
  return steps.find((step) => step >= least * (1 - 1e-9)) || 10 * power;
}

export function tickText(value, step, unit) {
  if (unit === "%" || unit === "points") [value, step] = [100 * value, 100 * step];
  let decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  if (Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) > 1e-6) decimals += 1;
  const size = Math.abs(value);
  let text = size >= 1e4 ? number(value) : value.toFixed(Math.min(decimals, 12));
  if (size > 0 && size < 1e-4) text = number(value);
  if (Number(text) === 0) text = "0";
  if (unit === "points" && value > step / 2) text = `+${text}`;
  return minus(text) + (unit === "%" ? "%" : "");
}

export function shortened(text, most) {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}
