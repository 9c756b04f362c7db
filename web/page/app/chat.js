// The chat box: a conversation with a served model, streamed.

import { byId, el, options, setAttribute, setHidden, setText } from "/app/dom.js";
import { count, millis } from "/app/format.js";
import { complete } from "/app/stream.js";

const CHATTY = ["ready", "loading", "placing"];
// How near the end of the log still counts as at the end, in pixels.
const NEAR = 40;

// One message on the page.
function bubble(role, text) {
  const body = el("div", { class: "bubble-text", text });
  const figures = el("p", { class: "quiet figures" });
  const root = el("article", { class: `bubble ${role}`, "aria-label": role === "user" ? "You" : "Answer" }, body, figures);
  return { root, body, figures };
}

export function chat() {
  const log = byId("log");
  const form = byId("composer");
  const prompt = byId("prompt");
  const send = byId("send");
  const select = byId("chat-model");
  const toEnd = byId("to-end");
  const empty = el("div", { class: "chat-empty" }, el("p", { class: "big" }), el("p", { class: "quiet" }));
  log.append(empty);

  let messages = [];
  let running = null;
  let following = true;
  let left = 0;

  // The log follows the answer only while the reader is at its end. Where a reader who scrolls up is, is seen at once: the
  // event comes with the next frame, and text may come before it.
  const atEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
  const toTheEnd = () => {
    following = true;
    log.scrollTop = log.scrollHeight;
    left = log.scrollTop;
    setHidden(toEnd, true);
  };
  const follow = () => {
    if (log.scrollTop < left) following = false;
    if (following) toTheEnd();
    else setHidden(toEnd, false);
  };
  log.addEventListener("scroll", () => {
    following = atEnd();
    setHidden(toEnd, following);
  });
  toEnd.addEventListener("click", () => {
    toTheEnd();
    log.focus();
  });

  const state = () => {
    const busy = running !== null;
    setText(send, busy ? "Stop" : "Send");
    setAttribute(send, "class", busy ? "danger" : "primary");
    send.disabled = !busy && (select.value === "" || prompt.value.trim() === "");
    setHidden(empty, log.childElementCount > 1);
  };

  const show = (part) => {
    log.append(part.root);
    toTheEnd();
  };

  async function answer() {
    const abort = new AbortController();
    const talk = messages;
    running = abort;
    const part = bubble("assistant", "");
    part.root.setAttribute("aria-busy", "true");
    setText(part.figures, "sent");
    show(part);
    state();
    const begun = performance.now();
    let first = null;
    let pieces = 0;
    let text = "";
    const speed = (tokens) => {
      const took = (performance.now() - first) / 1000;
      return tokens > 1 && took > 0 ? `${((tokens - 1) / took).toFixed(1)} tokens/s` : null;
    };
    try {
      await complete({ model: select.value, messages: talk, signal: abort.signal }, {
        waiting: (comment) => { if (first === null) setText(part.figures, waiting(comment)); },
        text: (piece) => {
          first ??= performance.now();
          pieces += 1;
          text += piece;
          part.body.append(piece);
          setText(part.figures, [`first text after ${millis(first - begun)}`, speed(pieces)].filter(Boolean).join(" · "));
          follow();
        },
        end: ({ reason, usage }) => {
          const tokens = usage?.completion_tokens ?? pieces;
          const words = [
            `${count(tokens)} tokens`,
            first === null ? null : speed(tokens),
            first === null ? null : `first text after ${millis(first - begun)}`,
            reason === "length" ? "ended by its length" : null,
          ];
          setText(part.figures, words.filter(Boolean).join(" · "));
        },
      });
      talk.push({ role: "assistant", content: text });
    } catch (error) {
      const stopped = error.name === "AbortError";
      // A question without any answer is forgotten: the next one is not asked on top of it.
      if (text !== "") talk.push({ role: "assistant", content: text });
      else talk.pop();
      setText(part.figures, stopped ? "stopped" : [error.message, error.fix].filter(Boolean).join(" "));
      if (!stopped) part.root.classList.add("failed");
    } finally {
      if (running === abort) running = null;
      part.root.removeAttribute("aria-busy");
      follow();
      state();
    }
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) {
      running.abort();
      return;
    }
    const text = prompt.value.trim();
    if (text === "" || select.value === "") return;
    messages.push({ role: "user", content: text });
    show(bubble("user", text));
    prompt.value = "";
    answer();
  });
  prompt.addEventListener("input", state);
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!running) form.requestSubmit();
    }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
  byId("chat-new").addEventListener("click", () => {
    running?.abort();
    messages = [];
    log.replaceChildren(empty);
    state();
    prompt.focus();
  });

  return {
    choose: (model) => {
      select.value = model;
      state();
      prompt.focus();
    },
    update: (swarm) => {
      const served = new Map();
      for (const instance of swarm.instances) {
        if (!CHATTY.includes(instance.state)) continue;
        if (!served.has(instance.model) || instance.state === "ready") served.set(instance.model, instance.state);
      }
      const entries = [...served].map(([value, how]) => ({ value, label: how === "ready" ? value : `${value} (${how})` }));
      entries.sort((a, b) => (served.get(a.value) === "ready" ? 0 : 1) - (served.get(b.value) === "ready" ? 0 : 1));
      options(select, entries);
      setHidden(select, entries.length === 0);
      const [big, small] = empty.children;
      setText(big, entries.length > 0 ? "Ask the swarm." : "No model is served yet.");
      setText(small, entries.length > 0 ? "The words you send and get never leave these machines." : "Serve one, then ask it here.");
      state();
    },
  };
}

// The comments of a stream, in words.
function waiting(comment) {
  const [word, figure] = comment.split(" ");
  if (word === "queued") return figure === "0" ? "next in the queue" : `queued, ${figure} before this one`;
  if (word === "loading") return `the model is loading: ${figure} MiB`;
  if (word === "prefill") return `reading ${figure} tokens`;
  return "waiting";
}
