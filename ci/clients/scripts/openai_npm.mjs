// OpenAI's own client for JavaScript.

import OpenAI from "openai";
import {
  AFTER, CAPITAL, COUNT, KEY, REAL, SCRIPTED, TALK, TOOL, WEATHER, WEATHER_TWICE, idle, refusal, row,
} from "./shown.mjs";

const real = new OpenAI({ baseURL: REAL.url, apiKey: KEY, maxRetries: 0 });
const scripted = new OpenAI({ baseURL: SCRIPTED.url, apiKey: KEY, maxRetries: 0 });
const user = (content) => [{ role: "user", content }];
const ask = (text, more = {}) =>
  scripted.chat.completions.create({ model: SCRIPTED.model, messages: user(text), ...more });

await row(
  "plain",
  async () => {
    const answer = await real.chat.completions.create({
      model: REAL.model, messages: user(CAPITAL), max_tokens: 20, temperature: 0,
    });
    return answer.choices[0].message.content;
  },
  (saw) => saw.includes("Paris"),
);
await row(
  "streamed",
  async () => {
    let text = "";
    for await (const chunk of await ask(CAPITAL, { stream: true })) text += chunk.choices[0]?.delta.content ?? "";
    return text;
  },
  (saw) => saw === TALK,
);
await row(
  "tools",
  async () => {
    const { message } = (await ask(WEATHER, { tools: [TOOL] })).choices[0];
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "sunny" };
    const answer = await scripted.chat.completions.create({
      model: SCRIPTED.model, messages: [...user(WEATHER), message, result], tools: [TOOL],
    });
    return [JSON.parse(message.tool_calls[0].function.arguments).city, answer.choices[0].message.content];
  },
  (saw) => saw[0] === "Paris" && saw[1] === AFTER,
);
await row(
  "parallel tools",
  async () => {
    const stream = scripted.chat.completions.stream({
      model: SCRIPTED.model, messages: user(WEATHER_TWICE), tools: [TOOL],
    });
    const { message } = (await stream.finalChatCompletion()).choices[0];
    return message.tool_calls.map((call) => JSON.parse(call.function.arguments).city);
  },
  (saw) => saw.join() === "Rome,Oslo",
);
await row(
  "structured output",
  async () => {
    const schema = {
      type: "object",
      properties: { fair: { type: "boolean" } },
      required: ["fair"],
      additionalProperties: false,
    };
    const answer = await real.chat.completions.parse({
      model: REAL.model,
      messages: user("Give a verdict."),
      max_tokens: 60,
      response_format: { type: "json_schema", json_schema: { name: "verdict", strict: true, schema } },
    });
    return JSON.parse(answer.choices[0].message.content);
  },
  (saw) => typeof saw.fair === "boolean",
);
await row(
  "usage",
  async () => {
    let usage;
    const stream = await ask(CAPITAL, { stream: true, stream_options: { include_usage: true } });
    for await (const chunk of stream) usage = chunk.usage ?? usage;
    return usage;
  },
  (saw) => saw.prompt_tokens > 0 && saw.completion_tokens > 0,
);
await row(
  "cancel",
  async () => {
    for await (const _ of await ask(COUNT, { stream: true })) break;
    return idle();
  },
  (saw) => saw,
);
await row(
  "error",
  () => refusal(() => ask("Hi", { temperature: 9 })),
  (saw) => saw.startsWith("BadRequestError") && saw.includes("temperature"),
);
await row(
  "responses",
  async () => {
    const stream = scripted.responses.stream({ model: SCRIPTED.model, input: CAPITAL });
    return (await stream.finalResponse()).output_text;
  },
  (saw) => saw === TALK,
);
