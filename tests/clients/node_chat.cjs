// The official OpenAI client's tool runner for Chat Completions, in one piece and streamed.
//
//     node node_chat.cjs BASE_URL STORY/MODEL ...     STORY is ran or streamed
//
// NODE_PATH names the folder of the client. Prints one JSON object: for each story what came, or how it broke.
'use strict';

const OpenAI = require('openai').default;

const WEATHER = {
  type: 'function',
  function: {
    name: 'get_weather',
    description: 'The weather in a city',
    parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
    parse: JSON.parse,
    function: ({ city }) => `sunny in ${city}`,
  },
};

async function ran(client, model, stream) {
  const messages = [{ role: 'user', content: 'What is the weather in all these cities?' }];
  const options = { maxChatCompletions: 64 };
  const runner = client.chat.completions.runTools({ model, stream, messages, tools: [WEATHER] }, options);
  const text = await runner.finalContent();
  const calls = runner.messages.flatMap((message) => message.tool_calls ?? []);
  return { text, calls, completions: runner.allChatCompletions() };
}

const STORIES = {
  ran: (client, model) => ran(client, model, false),
  streamed: (client, model) => ran(client, model, true),
};

async function tell(baseURL, name) {
  const [story, model] = name.split('/');
  try {
    return await STORIES[story](new OpenAI({ apiKey: 'sk-test', baseURL, maxRetries: 0 }), model);
  } catch (error) {
    return { broke: String(error.stack) };
  }
}

async function main() {
  const [baseURL, ...names] = process.argv.slice(2);
  const found = {};
  for (const name of names) found[name] = await tell(baseURL, name);
  process.stdout.write(JSON.stringify(found));
}

main();
