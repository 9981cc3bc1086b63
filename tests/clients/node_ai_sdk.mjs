// A hosted shell, or hosted Python code, by the Vercel AI SDK, as an application would write it.
//
//     node node_ai_sdk.mjs BASE_URL MODEL shell|code
//
// NODE_PATH names the folder of the SDK. Prints one JSON array: what came in one piece, and streamed.
import { createRequire } from 'node:module';

const load = createRequire(`${process.env.NODE_PATH}/`);
const { createOpenAI } = load('@ai-sdk/openai');
const { generateText, streamText } = load('ai');

/** What a client reads of a run: its answer, each call with its output, and the files that it cites. */
async function told(run) {
  const [calls, results, sources] = await Promise.all([run.toolCalls, run.toolResults, run.sources]);
  return {
    text: await run.text,
    calls: calls.map((call) => [call.toolName, call.providerExecuted]),
    results: results.map((result) => result.output),
    files: sources.map((source) => source.filename),
  };
}

const [baseURL, model, kind] = process.argv.slice(2);
const openai = createOpenAI({ apiKey: 'none', baseURL });
const tools = {
  shell: () => openai.tools.shell({ environment: { type: 'containerAuto' } }),
  code: () => openai.tools.codeInterpreter(),
};
const asked = { model: openai(model), prompt: 'Go', tools: { [kind]: tools[kind]() } };
const whole = await told(await generateText(asked));
const stream = streamText(asked);
await stream.consumeStream();
console.log(JSON.stringify([whole, await told(stream)]));
