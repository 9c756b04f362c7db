// Models on their way to a disk.

import { byId, el, keyed, setHidden, setText } from "/app/dom.js";
import { bytes, nodeName, percent, rate, seconds } from "/app/format.js";
import { bar } from "/app/parts.js";

function row() {
  const name = el("strong");
  const figures = el("span", { class: "quiet" });
  const done = bar();
  const root = el("div", { class: "download" }, el("p", null, name, " ", figures), done.root);
  return {
    root,
    update: ({ download, swarm }) => {
      setText(name, `${download.model} to ${nodeName(swarm, download.node)}`);
      const words = [
        `${bytes(download.done_bytes)} of ${bytes(download.total_bytes)}`,
        download.bytes_per_s === null ? null : rate(download.bytes_per_s),
        download.eta_ms === null ? null : `${seconds(download.eta_ms / 1000)} left`,
        `from ${download.source}`,
      ];
      const text = words.filter(Boolean).join(" · ");
      setText(figures, text);
      done.update(percent(download.done_bytes, download.total_bytes), text);
    },
  };
}

export function downloads() {
  const card = byId("downloads-card");
  const rows = keyed(byId("downloads"), row);
  return (swarm) => {
    setHidden(card, swarm.downloads.length === 0);
    rows(swarm.downloads.map((download) => ({ download, swarm })), ({ download }) => `${download.node} ${download.model}`);
  };
}
