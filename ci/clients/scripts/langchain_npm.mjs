// LangChain's ChatOpenAI for JavaScript.

import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { ChatOpenAI } from "@langchain/openai";
import {
  AFTER, CAPITAL, COUNT, KEY, REAL, SCRIPTED, TALK, TOOL, WEATHER, WEATHER_TWICE, idle, refusal, row,
} from "./shown.mjs";

const model = (served, more = {}) =>
  new ChatOpenAI({
    model: served.model, apiKey: KEY, maxRetries: 0, configuration: { baseURL: served.url }, ...more,
  });
const real = model(REAL, { temperature: 0, maxTokens: 60 });
const scripted = model(SCRIPTED);
const verdict = {
  title: "verdict",
  type: "object",
  properties: { fair: { type: "boolean" } },
  required: ["fair"],
  additionalProperties: false,
};

await row("plain", async () => (await real.invoke(CAPITAL)).content, (saw) => saw.includes("Paris"));
await row(
  "streamed",
  async () => {
    let text = "";
    for await (const chunk of await scripted.stream(CAPITAL)) text += chunk.content;
    return text;
  },
  (saw) => saw === TALK,
);
await row(
  "tools",
  async () => {
    const bound = scripted.bindTools([TOOL]);
    const asked = [new HumanMessage(WEATHER)];
    const message = await bound.invoke(asked);
    const [call] = message.tool_calls;
    const result = new ToolMessage({ content: "sunny", tool_call_id: call.id });
    return [call.args.city, (await bound.invoke([...asked, message, result])).content];
  },
  (saw) => saw[0] === "Paris" && saw[1] === AFTER,
);
await row(
  "parallel tools",
  async () => (await scripted.bindTools([TOOL]).invoke(WEATHER_TWICE)).tool_calls.map((call) => call.args.city).join(),
  (saw) => saw === "Rome,Oslo",
);
await row(
  "structured output",
  () => real.withStructuredOutput(verdict, { method: "jsonSchema" }).invoke("Give a verdict."),
  (saw) => typeof saw.fair === "boolean",
);
await row(
  "structured output by functionCalling",
  () => scripted.withStructuredOutput(verdict, { method: "functionCalling" }).invoke("Give a verdict."),
  (saw) => typeof saw.fair === "boolean",
);
await row("usage", async () => (await scripted.invoke(CAPITAL)).usage_metadata, (saw) => saw.output_tokens > 0);
await row(
  "cancel",
  async () => {
    for await (const _ of await scripted.stream(COUNT)) break;
    return idle();
  },
  (saw) => saw,
);
await row(
  "error",
  () => refusal(() => model(SCRIPTED, { temperature: 9 }).invoke("Hi")),
  (saw) => saw.includes("temperature"),
);
