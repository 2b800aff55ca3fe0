// openai-node against a gateway: `node openai_node.mjs URL MODEL`, with openai in NODE_PATH's place.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, model, folder] = process.argv.slice(2);
const require = createRequire(pathToFileURL(folder + "/"));
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")));
const { VERSION: version } = require("openai/version");

const client = new OpenAI({ baseURL: url, apiKey: "k", maxRetries: 0 });
const messages = [{ role: "user", content: "Who are you?" }];
const fixed = { model, messages, temperature: 0, max_completion_tokens: 24 };

const models = [];
for await (const one of await client.models.list()) models.push(one.id);
assert.deepEqual(models, [model]);

const whole = await client.chat.completions.create(fixed);
const text = whole.choices[0].message.content;
assert.ok(text);

let streamed = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...fixed,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const event of stream) {
  streamed += event.choices[0]?.delta?.content ?? "";
  usage = event.usage ?? usage;
}
assert.equal(streamed, text);
assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);

const runner = client.chat.completions.stream(fixed);
assert.equal(await runner.finalContent(), text);

const ended = await client.chat.completions.create({ ...fixed, max_completion_tokens: 1900, stream: true });
for await (const _ of ended) break; // closes the connection

const completion = await client.completions.create({ model, prompt: "Once", max_tokens: 4 });
assert.ok(completion.choices[0].text);

await assert.rejects(client.chat.completions.create({ ...fixed, model: "other" }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ ...fixed, top_p: 2 }), OpenAI.BadRequestError);
await assert.rejects(client.embeddings.create({ model, input: "text" }), OpenAI.BadRequestError);

console.log(`openai-node ${version}: ok`);
