// What every client's script shows: a row each, as a JSON line that the runner reads; see shown.py.

import { inspect } from "node:util";

const served = (name) => ({
  root: process.env[`${name}_URL`],
  url: `${process.env[`${name}_URL`]}/v1`,
  model: process.env[`${name}_MODEL`],
});

export const REAL = served("REAL");
export const SCRIPTED = served("SCRIPTED");
export const KEY = "not-asked-for";
export const CAPITAL = "What is the capital of France?";
export const TALK = "Paris is the capital of France.";
export const WEATHER = "What is the weather in Paris?";
export const WEATHER_TWICE = "Tell me the weather of both, Rome and Oslo.";
export const AFTER = "It is sunny in Paris.";
export const COUNT = "Please count without an end.";
export const PARAMETERS = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
export const TOOL = {
  type: "function",
  function: { name: "get_weather", description: "Tells the weather of a city.", parameters: PARAMETERS },
};

export async function row(name, show, holds) {
  let told;
  try {
    const saw = await show();
    told = { row: name, holds: Boolean(holds(saw)), saw: inspect(saw).slice(0, 2000) };
  } catch (error) {
    told = { row: name, holds: false, saw: inspect(error).slice(0, 2000) };
  }
  console.log(`\n${JSON.stringify(told)}`);
}

export async function refusal(call) {
  let found;
  try {
    found = await call();
  } catch (error) {
    return `${error.constructor.name}: ${error.message}`;
  }
  throw new Error(`expected an error, found ${inspect(found)}`);
}

export async function idle() {
  for (let tries = 0; tries < 200; tries += 1) {
    const load = await (await fetch(`${SCRIPTED.root}/load`)).json();
    if (load.running === 0) return true;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  return false;
}
