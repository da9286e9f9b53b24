// Vercel's AI SDK with its provider for servers like OpenAI's.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import {
  AFTER, CAPITAL, COUNT, KEY, PARAMETERS, REAL, SCRIPTED, TALK, WEATHER, WEATHER_TWICE, idle, refusal, row,
} from "./shown.mjs";

const model = (served, more = {}) =>
  createOpenAICompatible({ name: "llorch", baseURL: served.url, apiKey: KEY, includeUsage: true, ...more })(
    served.model,
  );
const once = { maxRetries: 0 };
const asked = [];
const tools = {
  get_weather: tool({
    description: "Tells the weather of a city.",
    inputSchema: jsonSchema(PARAMETERS),
    execute: async ({ city }) => {
      asked.push(city);
      return "sunny";
    },
  }),
};

await row(
  "plain",
  async () =>
    (await generateText({ model: model(REAL), prompt: CAPITAL, temperature: 0, maxOutputTokens: 20, ...once })).text,
  (saw) => saw.includes("Paris"),
);
await row(
  "streamed",
  async () => {
    let text = "";
    for await (const part of streamText({ model: model(SCRIPTED), prompt: CAPITAL, ...once }).textStream) text += part;
    return text;
  },
  (saw) => saw === TALK,
);
await row(
  "thoughts",
  async () => (await generateText({ model: model(SCRIPTED), prompt: CAPITAL, ...once })).reasoningText,
  (saw) => saw.includes("city"),
);
await row(
  "tools",
  async () => {
    asked.length = 0;
    const { text } = await generateText({
      model: model(SCRIPTED), prompt: WEATHER, tools, stopWhen: stepCountIs(3), ...once,
    });
    return [asked.join(), text];
  },
  (saw) => saw[0] === "Paris" && saw[1] === AFTER,
);
await row(
  "parallel tools",
  async () => {
    asked.length = 0;
    const { fullStream } = streamText({
      model: model(SCRIPTED), prompt: WEATHER_TWICE, tools, stopWhen: stepCountIs(1), ...once,
    });
    for await (const _ of fullStream);
    return asked.join();
  },
  (saw) => saw === "Rome,Oslo",
);
await row(
  "structured output",
  async () => {
    const schema = jsonSchema({
      type: "object",
      properties: { fair: { type: "boolean" } },
      required: ["fair"],
      additionalProperties: false,
    });
    const { output } = await generateText({
      model: model(REAL, { supportsStructuredOutputs: true }),
      prompt: "Give a verdict.",
      maxOutputTokens: 60,
      output: Output.object({ schema }),
      ...once,
    });
    return output;
  },
  (saw) => typeof saw.fair === "boolean",
);
await row(
  "usage",
  async () => {
    const answer = streamText({ model: model(SCRIPTED), prompt: CAPITAL, ...once });
    await answer.consumeStream();
    return answer.usage;
  },
  (saw) => saw.inputTokens > 0 && saw.outputTokens > 0,
);
await row(
  "cancel",
  async () => {
    const stop = new AbortController();
    const answer = streamText({ model: model(SCRIPTED), prompt: COUNT, abortSignal: stop.signal, ...once });
    for await (const _ of answer.textStream) {
      stop.abort();
      break;
    }
    return idle();
  },
  (saw) => saw,
);
await row(
  "error",
  () => refusal(() => generateText({ model: model(SCRIPTED), prompt: "Hi", temperature: 9, ...once })),
  (saw) => saw.includes("temperature"),
);
