// Numbers and times as short texts.

const UNITS = ["", "k", "M", "G", "T"];

export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  let unit = 0;
  let rest = Number(value);
  while (rest >= 999.5 && unit < UNITS.length - 1) {
    rest /= 1000;
    unit += 1;
  }
  const isWhole = rest >= 99.5 || Number.isInteger(rest);
  return `${isWhole ? Math.round(rest) : rest.toFixed(1)}${UNITS[unit]}`;
}

export function percent(share) {
  return share === null || share === undefined ? "-" : `${Math.round(share * 100)}%`;
}

export function milliseconds(ms) {
  if (ms === null || ms === undefined) return "-";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 9999.5 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

export function seconds(value) {
  return value < 9.995 ? `${value.toFixed(2)} s` : `${short(value)} s`;
}

export function clockTime(timeMs) {
  return new Date(timeMs).toLocaleTimeString([], { hour12: false });
}

export function duration(value) {
  const minutes = Math.floor(value / 60);
  const hours = Math.floor(minutes / 60);
  const days = Math.floor(hours / 24);
  if (days) return `${days} d ${hours % 24} h`;
  if (hours) return `${hours} h ${minutes % 60} min`;
  return minutes ? `${minutes} min ${Math.floor(value % 60)} s` : `${Math.floor(value)} s`;
}

// The end of a text that is too long: addresses and ids differ there.
export function endOf(text, chars) {
  const value = String(text ?? "");
  return value.length <= chars ? value : `…${value.slice(value.length - chars + 1)}`;
}
