// Chat Completions by the official JavaScript client: its runner of tools and its stream helper.
//
//     node_chat.cjs BASE_URL
//
// Prints one JSON object with what each gave.

const OpenAI = require("openai");

const [, , url] = process.argv;
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in all cities?" }];

async function run(stream) {
  const asked = [];
  const runner = client.chat.completions.runTools(
    {
      model: "loop",
      messages,
      stream,
      tools: [
        {
          type: "function",
          function: {
            name: "get_weather",
            parse: JSON.parse,
            parameters: { type: "object", properties: { city: { type: "string" } } },
            function: ({ city }) => (asked.push(city), "sunny"),
          },
        },
      ],
    },
    { maxChatCompletions: 40 },
  );
  const text = await runner.finalContent();
  const usage = stream ? null : await runner.totalUsage();
  return { asked, text, usage };
}

async function thought() {
  const parts = [];
  const stream = client.chat.completions.stream({ model: "thinking-text", messages });
  stream.on("chunk", (chunk) => parts.push(chunk.choices[0]?.delta?.reasoning_content ?? ""));
  const completion = await stream.finalChatCompletion();
  return { thought: parts.join(""), finish: completion.choices[0].finish_reason };
}

(async () => {
  const found = { runs: { plain: await run(false), streamed: await run(true) }, thinking: await thought() };
  console.log(JSON.stringify(found));
})();
