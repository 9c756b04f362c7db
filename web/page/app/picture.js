// The swarm drawn: nodes in a ring, links between them, and the way an answer takes while one is running. Nothing is
// drawn anew for an event; elements move and change. The tables below say the same in words.

import { tone } from "/app/colours.js";
import { byId, keyed, setAttribute, setHidden, setText, svg } from "/app/dom.js";
import { keyOf } from "/app/feed.js";
import { bytes, micros, nodeName, percent, plural } from "/app/format.js";
import { KINDS, STATES } from "/app/links.js";

// With more nodes than this, there is no room for names and figures.
const MANY = 9;
// A wider ring would only have longer lines.
const WIDEST = 620;
// A narrower picture has no room for figures on its lines.
const ROOMY = 420;
const TURN = 2 * Math.PI;

// Where each node stands, by id: a ring, stretched to the room there is. The scheduler has no special place: it
// changes.
function layout(nodes, width, height) {
  const many = nodes.length > MANY;
  const radius = many ? 15 : 31;
  // Room for a name beside the centre of a node, and for two lines under it.
  const beside = many ? radius + 4 : 56;
  const under = many ? radius + 4 : radius + 40;
  const start = nodes.length === 2 ? Math.PI : -TURN / 4;
  const ring = nodes.map((_, index) => {
    const angle = start + (TURN * index) / nodes.length;
    return { x: Math.cos(angle), y: Math.sin(angle) };
  });
  const stretch = (values, from, to) => {
    const [least, most] = [Math.min(...values), Math.max(...values)];
    if (most - least < 0.01) return values.map(() => (from + to) / 2);
    return values.map((value) => from + ((value - least) / (most - least)) * (to - from));
  };
  const half = Math.min(width / 2 - beside, WIDEST / 2);
  const xs = stretch(ring.map((point) => point.x), width / 2 - half, width / 2 + half);
  const ys = stretch(ring.map((point) => point.y), radius + 10, height - under);
  return new Map(nodes.map((node, index) => [node.id, { x: xs[index], y: ys[index], radius }]));
}

function drawnNode(item) {
  const title = svg("title");
  const disc = svg("circle", { class: "disc" });
  const track = svg("circle", { class: "track" });
  const used = svg("circle", { class: "used", pathLength: "100", transform: "rotate(-90)" });
  const figure = svg("text", { class: "figure", y: "1" });
  const unit = svg("text", { class: "unit", y: "14" });
  const name = svg("text", { class: "name" });
  const memory = svg("text", { class: "memory" });
  const badge = svg("g", { class: "badge" }, svg("circle", { r: "10" }), svg("path", { d: "M-5.500 3.500v-6l3 2.200L0-4.500 2.500-.300l3-2.200v6z" }));
  const root = svg("g", { class: `drawn-node ${tone(item.node.id)}` }, title, disc, track, used, figure, unit, name, memory, badge);
  return {
    root,
    update: ({ node, place, layers, many, swarm }) => {
      const { x, y, radius } = place;
      setAttribute(root, "transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
      setAttribute(root, "data-state", node.state);
      for (const circle of [track, used]) setAttribute(circle, "r", radius - 3);
      setAttribute(disc, "r", radius);
      const share = percent(node.memory.used_bytes, node.memory.offered_bytes);
      setAttribute(used, "stroke-dasharray", `${share.toFixed(1)} 100`);
      setText(figure, many || layers === 0 ? "" : String(layers));
      setText(unit, many || layers === 0 ? "" : layers === 1 ? "layer" : "layers");
      setText(name, many ? "" : short(node.name));
      setAttribute(name, "y", radius + 17);
      setText(memory, many ? "" : `${bytes(node.memory.used_bytes)} / ${bytes(node.memory.offered_bytes)}`);
      setAttribute(memory, "y", radius + 32);
      setAttribute(badge, "transform", `translate(${(radius * 0.72).toFixed(1)} ${(-radius * 0.72).toFixed(1)})`);
      setAttribute(badge, "display", node.id === swarm.scheduler ? null : "none");
      setText(title, `${node.name}: ${node.state}${node.id === swarm.scheduler ? ", scheduler" : ""}, ${plural(layers, "layer", "layers")}`);
    },
  };
}

const short = (name) => (name.length > 16 ? `${name.slice(0, 15)}…` : name);

function drawnLink() {
  const title = svg("title");
  const line = svg("line");
  const root = svg("g", { class: "drawn-link" }, title, line);
  return {
    root,
    update: ({ link, from, to, swarm }) => {
      setAttribute(root, "class", `drawn-link ${link.kind} ${STATES[link.state] ?? ""}`);
      setLine(line, from, to);
      const trip = link.rtt_us ? micros(link.rtt_us.p50) : "";
      setText(title, `${nodeName(swarm, link.a)} to ${nodeName(swarm, link.b)}: ${KINDS[link.kind] ?? link.kind}, ${link.state} ${trip}`);
    },
  };
}

// The round trip, written over the line and whatever flows on it.
function label() {
  const root = svg("text", { class: "trip" });
  return {
    root,
    update: ({ link, from, to }) => {
      setText(root, link.rtt_us ? micros(link.rtt_us.p50) : "");
      setAttribute(root, "x", ((from.x + to.x) / 2).toFixed(1));
      setAttribute(root, "y", ((from.y + to.y) / 2 + 4).toFixed(1));
    },
  };
}

function setLine(line, from, to) {
  setAttribute(line, "x1", from.x.toFixed(1));
  setAttribute(line, "y1", from.y.toFixed(1));
  setAttribute(line, "x2", to.x.toFixed(1));
  setAttribute(line, "y2", to.y.toFixed(1));
}

function flow() {
  const root = svg("line", { class: "flow" });
  return {
    root,
    update: ({ from, to, tone: colour }) => {
      setAttribute(root, "class", `flow ${colour}`);
      setLine(root, from, to);
    },
  };
}

// The hops of instances that are answering: from stage to stage, and from the last back to the first.
function hops(swarm, places) {
  const found = new Map();
  for (const instance of swarm.instances) {
    if (!instance.active || instance.stages.length < 2) continue;
    const ids = instance.stages.map((stage) => stage.ranks[0]?.node).filter((id) => places.has(id));
    ids.forEach((id, index) => {
      const next = ids[(index + 1) % ids.length];
      if (next !== id) found.set(`${id} ${next}`, { from: places.get(id), to: places.get(next), tone: tone(id) });
    });
  }
  return [...found].map(([key, hop]) => ({ key, ...hop }));
}

function layersOf(swarm, id) {
  const stages = swarm.instances.flatMap((instance) => instance.stages);
  return stages
    .filter((stage) => stage.ranks.some((rank) => rank.node === id))
    .reduce((sum, stage) => sum + stage.layers[1] - stage.layers[0], 0);
}

export function picture() {
  const box = byId("picture");
  const note = byId("picture-note");
  const layers = { links: svg("g"), flows: svg("g"), labels: svg("g"), nodes: svg("g") };
  const drawing = svg("svg", { role: "img" }, Object.values(layers));
  box.append(drawing);
  const drawLinks = keyed(layers.links, drawnLink);
  const drawFlows = keyed(layers.flows, flow);
  const drawLabels = keyed(layers.labels, label);
  const drawNodes = keyed(layers.nodes, drawnNode);
  let swarm = null;

  const draw = () => {
    if (!swarm || box.clientWidth === 0) return;
    const width = box.clientWidth;
    const nodes = swarm.nodes.filter((node) => node.state !== "gone").sort((a, b) => a.name.localeCompare(b.name) || (a.id < b.id ? -1 : 1));
    const height = nodes.length <= 2 ? 150 : nodes.length === 3 ? 240 : 310;
    setAttribute(drawing, "viewBox", `0 0 ${width} ${height}`);
    setAttribute(drawing, "height", height);
    const places = layout(nodes, width, height);
    const many = nodes.length > MANY;
    const drawn = swarm.links.filter((link) => places.has(link.a) && places.has(link.b));
    const lines = drawn.map((link) => ({ link, from: places.get(link.a), to: places.get(link.b), swarm }));
    const linkKey = ({ link }) => keyOf("links", link);
    drawLinks(lines, linkKey);
    drawLabels(many || (nodes.length > 2 && width < ROOMY) ? [] : lines, linkKey);
    drawFlows(hops(swarm, places), (hop) => hop.key);
    drawNodes(
      nodes.map((node) => ({ node, place: places.get(node.id), layers: layersOf(swarm, node.id), many, swarm })),
      ({ node }) => node.id,
    );
    setAttribute(drawing, "aria-label", `${plural(nodes.length, "node", "nodes")} and ${plural(drawn.length, "link", "links")}; the lists of nodes and links say the same in words`);
    const active = swarm.instances.reduce((sum, instance) => sum + (instance.active ?? 0), 0);
    setText(note, active > 0 ? `${plural(active, "answer", "answers")} running` : "");
    setHidden(note, active === 0);
  };

  new ResizeObserver(draw).observe(box);
  return (next) => {
    swarm = next;
    draw();
  };
}
