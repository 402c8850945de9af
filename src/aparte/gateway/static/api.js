// The gateway's API, as this page uses it.

let key = "";

export function useKey(given) {
  key = given;
}

function headers() {
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function failure(reply) {
  let message = `The gateway answered with status ${reply.status}.`;
  try {
    message = (await reply.json()).error.message;
  } catch {
    // Whatever answered is not the gateway.
  }
  return new ApiError(message, reply.status);
}

async function reach(path, options) {
  try {
    return await fetch(path, { ...options, headers: headers() });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The gateway cannot be reached. Is it still running?", 0);
  }
}

// What is known of the model.
export async function describe() {
  const reply = await reach("/v1/models", {});
  if (!reply.ok) throw await failure(reply);
  return (await reply.json()).data[0];
}

// The chunks of an answer, and comments as { comment }, while they come.
export async function* answer(body, signal) {
  const options = { include_usage: true, include_sent: true };
  const whole = JSON.stringify({ ...body, stream: true, stream_options: options });
  const reply = await reach("/v1/chat/completions", { method: "POST", body: whole, signal });
  if (!reply.ok) throw await failure(reply);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  let complete = false;
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The connection to the gateway broke.", 0);
    }
    if (part.done) break;
    const events = (held + part.value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (event.startsWith(": ")) yield { comment: event.slice(2) };
      else if (event === "data: [DONE]") complete = true;
      else {
        const chunk = JSON.parse(event.slice(6));
        if (chunk.error) throw new ApiError(chunk.error.message, 502);
        yield chunk;
      }
    }
  }
  if (!complete) throw new ApiError("The answer broke off. Is the gateway still running?", 0);
}
