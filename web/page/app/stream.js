// Reading a streamed chat answer: server-sent events over fetch, because EventSource cannot POST.

import { Refused, refusal } from "/app/api.js";

// Yields {comment} and {data} of each event, however the bytes are cut.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith(":")) yield { comment: line.slice(1).trim() };
      else if (line.startsWith("data:")) yield { data: line.slice(5).trim() };
    }
  }
}

// Asks for an answer and calls `on.waiting(comment)`, `on.text(piece)` and `on.end({reason, usage})`. Throws what
// went wrong; an abort through `signal` is an AbortError.
export async function complete({ model, messages, signal }, on) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ model, messages, stream: true, stream_options: { include_usage: true } }),
    signal,
  }).catch((error) => {
    throw error.name === "AbortError" ? error : new Refused("This node does not answer.", "Is shoal still running on this machine?");
  });
  if (!response.ok) throw await refusal(response);
  let reason = null;
  let usage = null;
  for await (const { comment, data } of events(response.body)) {
    if (comment !== undefined) {
      on.waiting(comment);
      continue;
    }
    if (data === "[DONE]") {
      on.end({ reason, usage });
      return;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(chunk.error.message, null);
    usage = chunk.usage ?? usage;
    const [choice] = chunk.choices;
    if (!choice) continue;
    reason = choice.finish_reason ?? reason;
    if (choice.delta.content) on.text(choice.delta.content);
  }
  throw new Refused("The answer broke off.", "Ask again.");
}
