// A coding agent with the Vercel AI SDK, over one WebSocket connection.
//
//     node examples/ai_sdk.mjs FOLDER
//
// OPENAI_BASE_URL is the URL of the server, EXAMPLE_MODEL names a model. Each step sends only the new items (`prepareStep`).
import { createOpenAI } from '@ai-sdk/openai';
import { createWebSocketFetch } from '@vercel/ai-sdk-openai-websocket-fetch';
import { stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';
import { INSTRUCTIONS, SHAPES, TASK, Workspace, where } from './workspace.mjs';

const TURNS_MAX = 30;
const RUN_MS_MAX = Number(process.env.RUN_MS_MAX ?? 600_000);
// The add-on ends a stream on `response.completed` and `error` only.
const ENDS = /"type":"response\.(failed|incomplete)"/;

/** The same fetch, whose streams also end on `response.failed` and `response.incomplete`. */
function endingFetch(inner) {
  return async (input, init) => {
    const response = await inner(input, init);
    if (!response.body || !response.headers.get('content-type')?.includes('text/event-stream')) return response;
    const ends = new TransformStream({
      transform(chunk, controller) {
        controller.enqueue(chunk);
        if (ENDS.test(new TextDecoder().decode(chunk).slice(0, 200))) controller.terminate();
      },
    });
    return new Response(response.body.pipeThrough(ends), response);
  };
}

async function main(folder) {
  const { baseURL, model } = await where();
  const socketFetch = createWebSocketFetch({ url: `${baseURL.replace(/^http/, 'ws')}/responses` });
  const apiKey = process.env.OPENAI_API_KEY ?? 'none';
  const openai = createOpenAI({ apiKey, baseURL, fetch: endingFetch(socketFetch) });
  const workspace = new Workspace(folder);
  const tools = Object.fromEntries(
    Object.entries(SHAPES).map(([name, [description, fields]]) => [
      name,
      tool({
        description,
        inputSchema: z.object(Object.fromEntries(Object.keys(fields).map((key) => [key, z.string()]))),
        execute: (given) => workspace.call(name, given),
      }),
    ]),
  );
  let failure;
  const run = streamText({
    model: openai(model),
    prompt: TASK,
    providerOptions: { openai: { instructions: INSTRUCTIONS } },
    tools,
    stopWhen: stepCountIs(TURNS_MAX),
    maxRetries: 1,
    abortSignal: AbortSignal.timeout(RUN_MS_MAX),
    onError: ({ error }) => (failure ??= error),
    prepareStep: ({ steps, messages }) => {
      const parent = steps.at(-1)?.providerMetadata?.openai?.responseId;
      if (!parent) return {};
      const openai = { instructions: INSTRUCTIONS, previousResponseId: parent };
      return { messages: messages.slice(-1), providerOptions: { openai } };
    },
  });
  await run.consumeStream({ onError: (error) => (failure ??= error) });
  if (failure) throw failure;
  const reason = await run.finishReason;
  if (reason !== 'stop') throw new Error(`the run ended without an answer: ${reason}`);
  const text = await run.text;
  await socketFetch.close?.();
  return text;
}

main(process.argv[2]).then(
  (text) => {
    console.log(text);
    process.exit(0);
  },
  (error) => {
    console.error(error?.message ?? JSON.stringify(error));
    process.exit(1);
  },
);
