// The official Anthropic client for JavaScript as applications use it.
//
//     node node_messages.cjs BASE_URL STORY/MODEL ...     STORY is one of those below
//
// NODE_PATH names the folder of the client. Prints one JSON object: for each story what came, or how it broke.
'use strict';

const Anthropic = require('@anthropic-ai/sdk').default;

const TURNS_MAX = 64;
const SCHEMA = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] };
const WEATHER = { name: 'get_weather', description: 'The weather in a city', input_schema: SCHEMA };
const QUESTION = { role: 'user', content: 'What is the weather in all these cities?' };

function results(message) {
  return message.content
    .filter((block) => block.type === 'tool_use')
    .map((block) => ({ type: 'tool_result', tool_use_id: block.id, content: `sunny in ${block.input.city}` }));
}

/** A tool loop to its end, with the whole history in each request. */
async function loop(ask) {
  const messages = [QUESTION];
  const turns = [];
  while (turns.length < TURNS_MAX) {
    const message = await ask({ max_tokens: 500, tools: [WEATHER], messages });
    turns.push(message);
    const answers = results(message);
    if (answers.length === 0) break;
    messages.push({ role: 'assistant', content: message.content }, { role: 'user', content: answers });
  }
  return turns;
}

const STORIES = {
  async created(client, model) {
    return { turns: await loop((fields) => client.messages.create({ model, ...fields })) };
  },

  async streamed(client, model) {
    const types = [];
    const turns = await loop(async (fields) => {
      const stream = client.messages.stream({ model, ...fields });
      const heard = [];
      stream.on('streamEvent', (event) => heard.push(event.type));
      const message = await stream.finalMessage();
      types.push(heard);
      return message;
    });
    return { turns, types };
  },

  async counted(client, model) {
    const fields = { model, messages: [QUESTION], tools: [WEATHER] };
    const { input_tokens: tokens } = await client.messages.countTokens(fields);
    const { usage } = await client.messages.create({ ...fields, max_tokens: 500 });
    return { tokens, usage };
  },

  async models(client, model) {
    const listed = [];
    for await (const one of client.models.list()) listed.push(one);
    return { listed, one: await client.models.retrieve(model) };
  },

  async refused(client) {
    try {
      await client.messages.create({ model: 'nobody', max_tokens: 5, messages: [QUESTION] });
      return {};
    } catch (error) {
      return { kind: error.constructor.name, status: error.status, body: error.error, request_id: error.requestID };
    }
  },
};

async function tell(baseURL, name) {
  const [story, model] = name.split('/');
  try {
    const client = new Anthropic({ apiKey: 'sk-test', baseURL: baseURL.replace(/\/v1$/, ''), maxRetries: 0 });
    return await STORIES[story](client, model);
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
