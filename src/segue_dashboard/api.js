// How does the page talk to the server? Requests and WebSocket connections, each with the API key if there is one.

const NAME = "segue-key";
let key = sessionStorage.getItem(NAME) ?? "";

export const hasKey = () => key !== "";
export const setKey = (value) => {
  key = value;
  sessionStorage.setItem(NAME, value);
};

export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const send = (path, options = {}) => {
  const headers = { ...(options.headers ?? {}), ...(key ? { authorization: `Bearer ${key}` } : {}) };
  return fetch(path, { ...options, headers, cache: "no-store" });
};

export const ask = async (path, options = {}) => {
  const answer = await send(path, options);
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({ error: null }));
  throw new Refused(
    answer.status,
    error?.code ?? "",
    error?.message ?? `The server answered ${answer.status}.`,
  );
};

export const askJson = async (path, options) => (await ask(path, options)).json();

// A browser cannot set a header on a WebSocket; the key is sent as a subprotocol.
export const openSocket = () => {
  const url = new URL("/v1/responses", location.href);
  url.protocol = url.protocol.replace("http", "ws");
  return key ? new WebSocket(url, ["segue.v1", `segue-key.${key}`]) : new WebSocket(url);
};

// The `data` of each event of an SSE body, as it arrives; `heard` gets the size of every chunk.
export async function* eventsOf(answer, heard = () => {}) {
  const reader = answer.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard(value.length);
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part
          .split("\n")
          .filter((line) => line.startsWith("data: "))
          .map((line) => line.slice(6))
          .join("\n");
        if (data) yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
