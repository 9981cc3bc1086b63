// A tool loop by the official Anthropic client for JavaScript, which uses threads by itself.
//
//     node anthropic_threads.cjs BASE_URL CONTROL_URL MODEL json|stream
//
// As anthropic_threads.py: each run of the tool first asks CONTROL_URL/N; prints what was sent, and how it ended.

const { default: Anthropic } = require("@anthropic-ai/sdk");
const { betaTool } = require("@anthropic-ai/sdk/helpers/beta/json-schema");

const [baseURL, control, model, way] = process.argv.slice(2);
const sent = [];
const cities = [];

async function record(url, init) {
  const body = JSON.parse(init.body);
  const hasHead = "system" in body || "tools" in body;
  const request = { thread: body.thread ?? null, messages: body.messages.length, has_head: hasHead };
  sent.push(request);
  const answer = await fetch(url, init);
  request.status = answer.status;
  return answer;
}

const weather = betaTool({
  name: "get_weather",
  description: "The weather in a city",
  inputSchema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  run: async ({ city }) => {
    cities.push(city);
    await (await fetch(`${control}/${cities.length}`)).text();
    return `sunny in ${city}`;
  },
});

async function main() {
  const client = new Anthropic({ baseURL, apiKey: "none", maxRetries: 0, fetch: record });
  const runner = client.beta.messages.toolRunner({
    model,
    max_tokens: 500,
    system: "Be short.",
    tools: [weather],
    messages: [{ role: "user", content: "Weather?" }],
    stream: way === "stream",
  });
  const messages = [];
  for await (const turn of runner) {
    messages.push(way === "stream" ? await turn.finalMessage() : turn);
  }
  const blocks = messages.at(-1).content.filter((block) => block.type === "text");
  const text = blocks.map((block) => block.text).join("");
  console.log(JSON.stringify({ sent, cities, text, answers: messages.length }));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
