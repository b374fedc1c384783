// Cases of the `openai` package for Node; prints a JSON object for each.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const { OpenAI } = createRequire(`${process.env.CLIENT_HOME}/`)("openai");
const { API, MODEL, INPUT, PROMPT, ANSWER } = JSON.parse(process.env.CLIENT_FACTS);
const client = new OpenAI({ baseURL: API, apiKey: "none", timeout: 30_000 });
const messages = [{ role: "developer", content: "Talk like a pirate." }, { role: "user", content: INPUT }];
const chat = client.chat.completions;
const ask = (fields, options) => chat.create({ model: MODEL, messages, ...fields }, options);
const text = async (...how) => (await ask(...how)).choices[0].message.content;
const respond = (fields) => client.responses.create({ model: MODEL, input: INPUT, ...fields });
const schema = { type: "object", properties: { room: { enum: ["kitchen"] } }, required: ["room"], additionalProperties: false };
const response_format = { type: "json_schema", json_schema: { name: "light", schema, strict: true } };
const collect = async (parts, of) => {
  let found = "";
  for await (const part of await parts) found += of(part) ?? "";
  return found;
};
const error = (call) => call.then(() => "no error", (raised) => raised.constructor.name);
const named = (call) => call.then(() => "no error", (raised) => raised.message.includes("tools"));

const cases = [
  ["chat", () => text(), ANSWER],
  ["streaming", () => collect(ask({ stream: true }), (part) => part.choices[0]?.delta?.content), ANSWER],
  ["streaming events", () => chat.stream({ model: MODEL, messages }).finalContent(), ANSWER],
  ["json schema", async () => JSON.parse(await text({ response_format })).room, "kitchen"],
  ["logprobs", async () => (await ask({ logprobs: true })).choices[0].logprobs.content.length > 0, true],
  ["completions", async () => (await client.completions.create({ model: MODEL, prompt: PROMPT })).choices[0].text, ANSWER],
  ["list of models", async () => (await collect(client.models.list(), (model) => model.id)).includes(MODEL), true],
  ["request id", async () => Boolean((await ask().withResponse()).request_id), true],
  ["retries", () => text({}, { maxRetries: 5 }), ANSWER],
  ["timeout", () => error(ask({}, { timeout: 1, maxRetries: 0 })), "APIConnectionTimeoutError"],
  ["unknown model", () => error(ask({ model: "none" })), "NotFoundError"],
  ["tools are refused by name", () => named(ask({ tools: [{ type: "function", function: { name: "f" } }] })), true],
  ["responses", async () => (await respond({ instructions: "Be brief." })).output_text, ANSWER],
  ["responses streamed", () => collect(respond({ stream: true }), (event) => event.delta), ANSWER],
];

for (const [name, call, expected] of cases) {
  const began = performance.now();
  const late = new Promise((_, fail) => setTimeout(fail, 60_000, new Error("over the time limit")).unref());
  const ended = Promise.race([call(), late]).then((found) => assert.deepEqual(found, expected));
  const error = await ended.then(() => "", String);
  const seconds = Math.round((performance.now() - began) / 10) / 100;
  console.log(JSON.stringify({ case: name, passed: !error, error, seconds }));
}
process.exit(0);
