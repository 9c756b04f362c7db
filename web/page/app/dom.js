// Making elements, and keeping lists of them in step with lists of data.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// An HTML element: el("p", { class: "quiet", text: "hi" }, child, ...). There is no way in for markup.
export const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

// The same for SVG.
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export const byId = (id) => document.getElementById(id);

// These touch the page only if something differs, so that nothing is announced or laid out for nothing.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value === true ? "" : value);
}
export function setHidden(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

// Keeps the children of `parent` in step with `items`: one part per key, made by `create(item)`, which returns
// {root, update(item)}. Elements stay, with focus and selection, as long as their key does.
export function keyed(parent, create) {
  const parts = new Map();
  return (items, key) => {
    const wanted = new Set(items.map(key));
    for (const [name, part] of parts) {
      if (wanted.has(name)) continue;
      part.root.remove();
      parts.delete(name);
    }
    let before = parent.firstElementChild;
    for (const item of items) {
      const name = key(item);
      let part = parts.get(name);
      if (!part) {
        part = create(item);
        parts.set(name, part);
      }
      if (part.root === before) before = before.nextElementSibling;
      else parent.insertBefore(part.root, before);
      part.update(item);
    }
  };
}

// Options of a <select>, kept in step; the choice stays while it exists.
export function options(select, entries) {
  const text = JSON.stringify(entries);
  if (select.dataset.entries === text) return;
  select.dataset.entries = text;
  const chosen = select.value;
  select.replaceChildren(...entries.map(({ value, label }) => el("option", { value, text: label })));
  if (entries.some(({ value }) => value === chosen)) select.value = chosen;
}
