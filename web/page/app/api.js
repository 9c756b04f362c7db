// Requests to the node. An error has words for people: what went wrong, and what to do.

export class Refused extends Error {
  constructor(message, fix) {
    super(message);
    this.fix = fix;
  }
}

export async function ask(method, path, body) {
  const request = { method, headers: {} };
  if (body !== undefined) {
    request.headers["content-type"] = "application/json";
    request.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, request);
  } catch {
    throw new Refused("This node does not answer.", "Is shoal still running on this machine?");
  }
  return response.ok ? response.json() : Promise.reject(await refusal(response));
}

// What an answer with an error status says. Both shapes of errors have `error.message`.
export async function refusal(response) {
  try {
    const { error } = await response.json();
    return new Refused(error.message, error.fix ?? null);
  } catch {
    return new Refused(`The node answered with status ${response.status}.`, null);
  }
}
