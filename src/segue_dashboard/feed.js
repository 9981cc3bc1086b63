// What does the server report about itself? One stream, kept open: it reconnects after a loss, and shows it.

import { Refused, ask, eventsOf } from "./api.js";

const WAIT_MS = 400;
const WAIT_MS_MAX = 8000;
// The server sends something at least every 15 s; a stream that is silent for longer is dead.
const SILENT_MS_MAX = 40000;

// `on` has hello, update, state(name, text) and denied(error).
export const follow = (on) => {
  let wait = WAIT_MS;
  let wake = () => {};
  let asking = null;

  const listen = async () => {
    asking = new AbortController();
    let watch = setTimeout(() => asking.abort(), SILENT_MS_MAX);
    const heard = () => {
      clearTimeout(watch);
      watch = setTimeout(() => asking.abort(), SILENT_MS_MAX);
    };
    try {
      const answer = await ask("/dashboard/feed", { signal: asking.signal });
      for await (const data of eventsOf(answer, heard)) {
        const message = JSON.parse(data);
        if (message.type === "hello") {
          wait = WAIT_MS;
          on.state("live", "live");
        }
        on[message.type]?.(message);
      }
    } finally {
      clearTimeout(watch);
    }
  };

  const pause = (ms) =>
    new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });

  const run = async () => {
    for (;;) {
      try {
        await listen();
      } catch (error) {
        if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
          on.state("lost", "no access");
          on.denied(error);
          await new Promise((resolve) => {
            wake = resolve;
          });
          continue;
        }
      }
      const ms = Math.round(wait * (0.75 + Math.random() / 2));
      on.state("lost", `reconnecting in ${(ms / 1000).toFixed(1)} s`);
      await pause(ms);
      wait = Math.min(WAIT_MS_MAX, wait * 1.7);
      on.state("connecting", "connecting");
    }
  };

  run();
  addEventListener("online", () => wake());
  // Reconnect now: with a new key, or on request. An open stream is opened again.
  return {
    retry() {
      wait = WAIT_MS;
      asking?.abort();
      wake();
    },
  };
};
