// Requests to this page's own server, with the token in a header. A browser never sends that by
// itself. The token is kept for this tab only, and is removed from the address bar at once.
// A report has no server: the answers are in the file.

const KEY = "headrace-token";
const MAX_CHARS = 16 * 2 ** 20;
const held = document.getElementById("answers");
const answers = held ? JSON.parse(held.textContent) : null;
export const isReport = answers !== null;

export class RequestError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function takeToken() {
  const found = /(?:^#|&)token=([^&]+)/.exec(location.hash);
  if (!found) return;
  sessionStorage.setItem(KEY, decodeURIComponent(found[1]));
  history.replaceState(null, "", location.pathname);
}

export const setToken = (token) => sessionStorage.setItem(KEY, token);
export const forgetToken = () => sessionStorage.removeItem(KEY);
const headers = () => ({ Authorization: `Bearer ${sessionStorage.getItem(KEY) ?? ""}` });

async function request(path, options) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: { ...headers(), ...options?.headers }, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError(0, "the dashboard's server does not answer: is `headrace run dashboard` still running?");
  }
  if (answer.ok) return answer;
  let message = `the server answered ${answer.status}`;
  try {
    message = (await answer.json()).error ?? message;
  } catch {
    // Not JSON: only the status is known.
  }
  throw new RequestError(answer.status, message);
}

export async function get(path) {
  if (isReport) {
    const name = path.slice("/api/".length).split("?")[0];
    if (Object.hasOwn(answers, name)) return answers[name];
    throw new RequestError(404, "this report does not have it");
  }
  return (await request(path)).json();
}

export async function post(path, values) {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(values) };
  return (await request(path, options)).json();
}

export const runPath = (run, rest) => `/api/runs/${encodeURIComponent(run)}/${rest}`;

// Server-sent events, read with fetch because an EventSource cannot send headers. Reconnects.
export function follow(path, onPicture, onState) {
  if (isReport) {
    onState("report", "");
    get(path).then(onPicture);
    return () => {};
  }
  const ended = new AbortController();
  let pause_ms = 500;

  async function read() {
    const answer = await request(path, { signal: ended.signal });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      if (text.length > MAX_CHARS) throw new RequestError(0, "a snapshot is too large");
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (data) {
          pause_ms = 500;
          onState("live", "");
          onPicture(JSON.parse(data));
        }
      }
    }
  }

  async function loop() {
    while (!ended.signal.aborted) {
      try {
        await read();
        onState("away", "the dashboard's server has ended the connection");
      } catch (error) {
        if (ended.signal.aborted) return;
        if (error.status === 401) return onState("refused", error.message);
        onState("away", error.message);
      }
      await new Promise((resolve) => setTimeout(resolve, pause_ms));
      pause_ms = Math.min(2 * pause_ms, 10000);
    }
  }
  loop();
  return () => ended.abort();
}
