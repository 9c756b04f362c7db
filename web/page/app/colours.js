// Each node has a colour of its own, the same in the picture, in the bars and in the lists, for as long as the page
// is open. Whoever is there first gets one first. The colours are in style.css as .tone-0 to .tone-7.

const TONES = 8;
const given = new Map();

export function tone(id) {
  if (!given.has(id)) given.set(id, given.size % TONES);
  return `tone-${given.get(id)}`;
}

export function claim(nodes) {
  for (const id of nodes.map((node) => node.id).sort()) tone(id);
}
