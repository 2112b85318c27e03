// Server-sent events of a response, and errors of the API.

const MAX_LINE_CHARS = 16 * 1024 * 1024;

// Yields the data of each event up to `[DONE]`, as objects.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the answer ended before its end; the connection was lost");
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      if (rest.length > MAX_LINE_CHARS) throw new Error("an event is too long");
      for (const line of lines) {
        if (!line.startsWith("data:")) continue; // comments and ends of events
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// An answer of the API that is no success.
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Throws an ApiError unless the response is a success.
export async function checkResponse(response) {
  if (response.ok) return;
  let message = `status ${response.status}`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // The body is not that of an error of Baton, for example a proxy's.
  }
  const wait = response.headers.get("retry-after");
  const later = wait && /^\d{1,5}$/.test(wait) ? ` (try again in ${wait} s)` : "";
  throw new ApiError(response.status, `${message}${later}`);
}

// A path of this server, also where a proxy puts the page below another path.
export function url(path) {
  return new URL(path, document.baseURI).href;
}
