// Anthropic's own client for JavaScript.

import Anthropic from "@anthropic-ai/sdk";
import {
  AFTER, CAPITAL, COUNT, KEY, PARAMETERS, REAL, SCRIPTED, TALK, WEATHER, WEATHER_TWICE, idle, refusal, row,
} from "./shown.mjs";

const real = new Anthropic({ baseURL: REAL.root, apiKey: KEY, maxRetries: 0 });
const scripted = new Anthropic({ baseURL: SCRIPTED.root, apiKey: KEY, maxRetries: 0 });
const tools = [{ name: "get_weather", description: "Tells the weather of a city.", input_schema: PARAMETERS }];
const body = (text, more = {}) => ({
  model: SCRIPTED.model, max_tokens: 60, messages: [{ role: "user", content: text }], ...more,
});

await row(
  "plain",
  async () =>
    (await real.messages.create(body(CAPITAL, { model: REAL.model, max_tokens: 20, temperature: 0 }))).content[0].text,
  (saw) => saw.includes("Paris"),
);
await row("streamed", () => scripted.messages.stream(body(CAPITAL)).finalText(), (saw) => saw === TALK);
await row(
  "tools",
  async () => {
    const first = await scripted.messages.create(body(WEATHER, { tools }));
    const call = first.content.find((block) => block.type === "tool_use");
    const result = { type: "tool_result", tool_use_id: call.id, content: "sunny" };
    const messages = [
      { role: "user", content: WEATHER },
      { role: "assistant", content: first.content },
      { role: "user", content: [result] },
    ];
    const second = await scripted.messages.create(body("", { messages, tools }));
    return [call.input.city, second.content.find((block) => block.type === "text").text];
  },
  (saw) => saw[0] === "Paris" && saw[1] === AFTER,
);
await row(
  "parallel tools",
  async () => {
    const { content } = await scripted.messages.stream(body(WEATHER_TWICE, { tools })).finalMessage();
    return content.filter((block) => block.type === "tool_use").map((block) => block.input.city).join();
  },
  (saw) => saw === "Rome,Oslo",
);
await row("usage", async () => (await scripted.messages.create(body(CAPITAL))).usage, (saw) => saw.output_tokens > 0);
await row(
  "cancel",
  async () => {
    for await (const _ of scripted.messages.stream(body(COUNT, { max_tokens: 4000 }))) break;
    return idle();
  },
  (saw) => saw,
);
await row(
  "error",
  () => refusal(() => scripted.messages.create(body("Hi", { temperature: 9 }))),
  (saw) => saw.includes("temperature"),
);
