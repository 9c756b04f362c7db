// Small parts that several sections use.

import { el, setAttribute, setText } from "/app/dom.js";
import { bytes } from "/app/format.js";

// A horizontal bar that a screen reader reads as a figure.
export function bar() {
  const filled = el("div", { class: "bar-fill" });
  const root = el("div", { class: "meter", role: "img" }, filled);
  return {
    root,
    update: (part, label) => {
      const width = `${part.toFixed(1)}%`;
      if (filled.style.width !== width) filled.style.width = width;
      setAttribute(root, "aria-label", label);
    },
  };
}

// A button that asks once more before it acts.
export function sure(label, question, act) {
  const button = el("button", { type: "button", class: "danger", text: label });
  let armed = null;
  const disarm = () => {
    clearTimeout(armed);
    armed = null;
    setText(button, label);
  };
  button.addEventListener("click", async () => {
    if (armed === null) {
      setText(button, question);
      armed = setTimeout(disarm, 4000);
      return;
    }
    disarm();
    button.disabled = true;
    try {
      await act();
    } finally {
      button.disabled = false;
    }
  });
  button.addEventListener("blur", () => { if (armed !== null) disarm(); });
  return button;
}

// Why something fits nowhere: what each node lacks, and the nearest changes that would help.
export function whyNot({ nodes, nearest }) {
  const row = (node) =>
    el(
      "tr",
      null,
      el("th", { scope: "row", text: node.name }),
      el("td", { class: "num", text: bytes(node.offered_bytes) }),
      el("td", { class: "num", text: bytes(node.used_bytes) }),
      el("td", { class: "num", text: bytes(node.needed_bytes) }),
      el("td", { class: node.missing_bytes ? "num lacks" : "num", text: bytes(node.missing_bytes) }),
      el("td", { class: "words", text: node.text }),
    );
  const heads = ["Node", "Offers", "In use", "Needs", "Lacks", "Why"];
  const head = heads.map((text, at) => el("th", { scope: "col", class: at > 0 && at < 5 ? "num" : null, text }));
  const table = el("table", null, el("thead", null, el("tr", null, head)), el("tbody", null, nodes.map(row)));
  const region = { class: "scroll", tabindex: "0", role: "group", "aria-label": "What each node lacks" };
  const changes = nearest.map((change) => el("li", { text: change.text }));
  return [
    el("div", region, table),
    changes.length > 0 ? el("p", { class: "quiet", text: "What would make it fit:" }) : null,
    changes.length > 0 ? el("ul", { class: "plain" }, changes) : null,
  ];
}
