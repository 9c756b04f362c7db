// Numbers and names as people read them.

const dash = "–";
const known = (value) => value !== null && value !== undefined;

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

// 90000000 -> "90 MB". Decimal units, as the command line uses.
export function bytes(value) {
  if (!known(value)) return dash;
  let unit = 0;
  let rest = value;
  while (rest >= 1000 && unit < UNITS.length - 1) {
    rest /= 1000;
    unit += 1;
  }
  const digits = unit > 0 && rest < 10 ? 1 : 0;
  return `${rest.toFixed(digits).replace(/\.0$/, "")} ${UNITS[unit]}`;
}

export const rate = (value) => (known(value) ? `${bytes(value)}/s` : dash);

// 182 -> "182 µs", 4200 -> "4.2 ms".
export function micros(value) {
  if (!known(value)) return dash;
  if (value < 1000) return `${Math.round(value)} µs`;
  return millis(value / 1000);
}

export function millis(value) {
  if (!known(value)) return dash;
  if (value < 10) return `${value.toFixed(1)} ms`;
  if (value < 1000) return `${Math.round(value)} ms`;
  return seconds(value / 1000);
}

// 510 -> "8:30", 42 -> "42 s".
export function seconds(value) {
  const whole = Math.max(0, Math.round(value));
  if (whole < 60) return value < 10 && value !== whole ? `${value.toFixed(1)} s` : `${whole} s`;
  const two = (part) => String(part).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor((whole % 3600) / 60);
  return hours > 0 ? `${hours}:${two(minutes)}:${two(whole % 60)} h` : `${minutes}:${two(whole % 60)} min`;
}

export const count = (value) => (known(value) ? value.toLocaleString("en") : dash);

export const plural = (number, one, many) => `${count(number)} ${number === 1 ? one : many}`;

export const time = (instant) => new Date(instant).toLocaleTimeString();

// [0, 14] -> "layers 0 to 13". Ranges come without their end.
export function layers([start, end]) {
  if (end - start === 0) return "no layers";
  return end - start === 1 ? `layer ${start}` : `layers ${start} to ${end - 1}`;
}

export const percent = (part, whole) => (known(part) && whole > 0 ? Math.min(100, (100 * part) / whole) : 0);

// A node's name, wherever only its id is known.
export function nodeName(swarm, id) {
  const node = swarm.nodes.find((one) => one.id === id);
  return node ? node.name : shortId(id);
}

// The end of a peer id tells ids apart; the beginning is always the same.
export const shortId = (id) => (id.length > 12 ? `…${id.slice(-8)}` : id);
