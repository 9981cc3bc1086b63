// A coding agent with the OpenAI Agents SDK for JavaScript, over one WebSocket connection. Needs Node 22 or newer.
//
//     node examples/agents_js.mjs FOLDER
//
// OPENAI_BASE_URL is the URL of the server, EXAMPLE_MODEL names a model.
import { Agent, OpenAIProvider, Runner, tool } from '@openai/agents';
import OpenAI from 'openai';
import { z } from 'zod';
import { INSTRUCTIONS, SHAPES, TASK, Workspace, where } from './workspace.mjs';

const TURNS_MAX = 30;
const RUN_MS_MAX = Number(process.env.RUN_MS_MAX ?? 600_000);

async function main(folder) {
  const { baseURL, model } = await where();
  const client = new OpenAI({ baseURL, apiKey: process.env.OPENAI_API_KEY ?? 'none' });
  const provider = new OpenAIProvider({ openAIClient: client, useResponses: true, useResponsesWebSocket: true });
  const workspace = new Workspace(folder);
  const tools = Object.entries(SHAPES).map(([name, [description, fields]]) =>
    tool({
      name,
      description,
      parameters: z.object(Object.fromEntries(Object.keys(fields).map((key) => [key, z.string()]))),
      execute: (given) => workspace.call(name, given),
    }),
  );
  const agent = new Agent({ name: 'fixer', model, instructions: INSTRUCTIONS, tools });
  const runner = new Runner({ modelProvider: provider, tracingDisabled: true });
  // A socket that cannot be opened leaves this SDK's stream unsettled; the timer keeps the process and says so.
  const late = setTimeout(() => fail(new Error('nothing came for too long')), RUN_MS_MAX);
  const run = await runner.run(agent, TASK, { stream: true, maxTurns: TURNS_MAX });
  for await (const _ of run);
  await run.completed;
  clearTimeout(late);
  await provider.close();
  return run.finalOutput;
}

function fail(error) {
  console.error(`${error.constructor.name}: ${error.message || error.cause?.message || 'the socket broke'}`);
  process.exit(1);
}

process.on('unhandledRejection', fail);
main(process.argv[2]).then(console.log, fail);
