// The page of a worker: a conversation over /v1/chat/completions, and its figures from /load every second.
// Text from the model is only ever set as text, never as HTML.
"use strict";

const POLL_MS = 1000;
const KEPT_SPEEDS = 60;
const MOST_REPLICAS = 64; // in the table; /load and /metrics have all
const TOKEN_KEY = "llorch-token";

const byId = (id) => document.getElementById(id);
const messages = [];
let token = sessionStorage.getItem(TOKEN_KEY) ?? "";
let running = null; // the AbortController of the answer that is being written
let talk = 0; // counts conversations: what is still under way when one is cleared belongs to none
let counted = null; // the last figures, with their time
let facts = false; // whether the model has been described
const speeds = [];

function headers(extra = {}) {
  return token ? { ...extra, Authorization: `Bearer ${token}` } : extra;
}

class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers(options.headers) });
  if (answer.ok) return answer;
  let text = `${answer.status} ${answer.statusText}`;
  try {
    text = (await answer.json()).error.message;
  } catch {
    // no JSON: the status has to do
  }
  throw new Refusal(answer.status, text);
}

function tell(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = !text;
}

function wantToken() {
  const dialog = byId("ask");
  if (!dialog.open) dialog.showModal();
}

byId("token-form").addEventListener("submit", () => {
  token = byId("token").value.trim();
  sessionStorage.setItem(TOKEN_KEY, token);
  byId("token").value = "";
  tell("");
  look();
});

// The conversation.

function addTurn(role, text) {
  byId("empty").hidden = true;
  const turn = document.createElement("li");
  turn.className = `turn ${role}`;
  const who = document.createElement("span");
  who.className = "unseen";
  who.textContent = role === "user" ? "You: " : "Model: ";
  const body = document.createElement("div");
  body.className = "text";
  body.textContent = text;
  const note = document.createElement("div");
  note.className = "note";
  turn.append(who, body, note);
  byId("log").append(turn);
  turn.scrollIntoView({ block: "end" });
  return { turn, body, note };
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

function number(id) {
  const value = byId(id).value;
  return value === "" ? undefined : Number(value);
}

function body() {
  const system = byId("system").value.trim();
  return JSON.stringify({
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
  });
}

function describe(usage, begun, first, reason) {
  if (!usage) return reason;
  const seconds = (performance.now() - first) / 1000;
  const rate = usage.completion_tokens > 1 && seconds > 0 ? (usage.completion_tokens - 1) / seconds : 0;
  const parts = [`${usage.completion_tokens} tokens`];
  if (rate) parts.push(`${rate.toFixed(1)} tokens/s`);
  parts.push(`first after ${((first - begun) / 1000).toFixed(2)} s`);
  if (reason === "length") parts.push("cut at the most tokens");
  return parts.join(" · ");
}

async function answer() {
  const { turn, body: target, note } = addTurn("assistant", "");
  turn.classList.add("busy");
  const begun = performance.now(), mine = talk;
  let text = "", first = begun, reason = "", usage = null;
  running = new AbortController();
  setBusy(true);
  try {
    const reply = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: body(),
      signal: running.signal,
    });
    for await (const event of events(reply)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      if (choice.delta.content) {
        if (!text) first = performance.now();
        text += choice.delta.content;
        target.textContent = text;
        byId("log").scrollTop = byId("log").scrollHeight;
      }
      reason = choice.finish_reason ?? reason;
    }
    note.textContent = describe(usage, begun, first, reason);
  } catch (error) {
    if (error.name === "AbortError") {
      note.textContent = "stopped";
    } else {
      note.textContent = "failed";
      tell(error.message);
      if (error.status === 401) wantToken();
    }
  } finally {
    turn.classList.remove("busy");
    if (mine === talk) conclude(turn, text, note.textContent === "stopped");
    byId("log").scrollTop = byId("log").scrollHeight;
    running = null;
    setBusy(false);
  }
}

function conclude(turn, text, stopped) {
  if (text) {
    messages.push({ role: "assistant", content: text });
    return;
  }
  messages.pop(); // the question comes back, to be sent again
  const question = turn.previousElementSibling;
  if (!byId("prompt").value) byId("prompt").value = question.querySelector(".text").textContent;
  if (!stopped) {
    question.remove();
    turn.remove();
  }
}

function setBusy(busy) {
  byId("send").disabled = busy;
  byId("stop").hidden = !busy;
  if (!busy) byId("prompt").focus();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt").value.trim();
  if (!text || running) return;
  tell("");
  byId("prompt").value = "";
  messages.push({ role: "user", content: text });
  addTurn("user", text);
  answer();
});

byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});

byId("stop").addEventListener("click", () => running?.abort());

byId("clear").addEventListener("click", () => {
  talk += 1;
  running?.abort();
  messages.length = 0;
  for (const turn of [...byId("log").querySelectorAll(".turn")]) turn.remove();
  byId("empty").hidden = false;
  tell("");
});

// The worker's figures.

function draw() {
  const top = Math.max(1, ...speeds);
  const step = 240 / (KEPT_SPEEDS - 1);
  const start = KEPT_SPEEDS - speeds.length;
  const points = speeds.map((speed, i) => `${((start + i) * step).toFixed(1)},${(46 - 42 * (speed / top)).toFixed(1)}`);
  if (points.length < 2) return;
  byId("line").setAttribute("d", `M${points.join("L")}`);
  byId("area").setAttribute("d", `M${points[0].split(",")[0]},48L${points.join("L")}L240,48Z`);
}

function percent(part, whole) {
  return whole ? (100 * part) / whole : 0;
}

function show(load) {
  const now = performance.now();
  if (counted && load.generated_tokens >= counted.tokens) {
    const speed = (1000 * (load.generated_tokens - counted.tokens)) / (now - counted.at);
    speeds.push(speed);
    if (speeds.length > KEPT_SPEEDS) speeds.shift();
    byId("speed").textContent = speed.toFixed(1);
    draw();
  }
  counted = { tokens: load.generated_tokens, at: now };
  byId("slots").textContent = `${load.running} of ${load.slots}`;
  byId("waiting").textContent = load.waiting;
  byId("generated").textContent = load.generated_tokens.toLocaleString("en");
  byId("hits").textContent = `${percent(load.cached_tokens, load.prompt_tokens).toFixed(0)} %`;
  const cells = byId("cells");
  while (cells.childElementCount < Math.min(load.slots, 64)) cells.append(document.createElement("li"));
  [...cells.children].forEach((cell, i) => cell.classList.toggle("on", i < load.running));
  const used = percent(load.kv_tokens_running, load.kv_tokens_total);
  const kept = percent(load.kv_tokens_idle, load.kv_tokens_total);
  byId("kv").textContent = `${(used + kept).toFixed(1)} %`;
  byId("kv-bar").setAttribute("aria-valuenow", (used + kept).toFixed(1));
  byId("kv-running").style.width = `${used}%`;
  byId("kv-idle").style.width = `${kept}%`;
}

function replicaRow(one) {
  const row = document.createElement("tr");
  const values = [one.replica, `${one.running} of ${one.slots}`, one.waiting, Number(one.tokens_per_second).toFixed(1)];
  for (const value of values) {
    const cell = document.createElement("td");
    cell.textContent = value;
    row.append(cell);
  }
  row.firstChild.title = one.replica; // long names are cut
  return row;
}

// Only a front over replicas tells of any.
function showReplicas(replicas) {
  byId("replicas").hidden = !replicas;
  if (!replicas) return;
  const left = replicas.length - MOST_REPLICAS;
  byId("replica-count").textContent = replicas.length;
  byId("replica-rows").replaceChildren(...replicas.slice(0, MOST_REPLICAS).map(replicaRow));
  byId("replicas-more").textContent = left > 0 ? `and ${left} more` : "";
}

function showState(state) {
  if (byId("state").textContent === state) return;
  byId("state").textContent = state;
  byId("state").dataset.state = state === "busy" ? "ready" : state;
}

async function showFacts() {
  const model = (await (await ask("/v1/models")).json()).data[0];
  const info = model.llorch;
  byId("model").textContent = model.id;
  document.title = `${model.id} · llorch`;
  const rows = [
    ["Precision", info.precision],
    ["Runs on", info.provider.replace("ExecutionProvider", "")],
    ["Context", `${info.context_length.toLocaleString("en")} tokens`],
    ["Vocabulary", info.vocab_size.toLocaleString("en")],
    ["Fingerprint", info.fingerprint.slice(0, 12)],
    ["llorch", info.version],
  ];
  byId("facts").replaceChildren(
    ...rows.map(([name, value]) => {
      const row = document.createElement("div");
      const key = document.createElement("dt");
      const text = document.createElement("dd");
      key.textContent = name;
      text.textContent = value;
      row.append(key, text);
      return row;
    }),
  );
  if (!info.has_chat_template) tell("This model has no chat template, so it cannot be chatted with here.");
  facts = true;
}

async function look() {
  try {
    const health = await (await fetch("/health")).json();
    const loading = health.status === "starting";
    showState(loading ? `loading, ${health.load_percent.toFixed(0)} %` : health.status);
    if (health.reason) return;
    if (!facts) await showFacts();
    const load = await (await ask("/load")).json();
    show(load);
    showReplicas(load.replicas);
  } catch (error) {
    if (error.status === 401) wantToken();
    else showState("not reachable");
  }
}

async function watch() {
  await look();
  setTimeout(watch, POLL_MS);
}

watch();
byId("prompt").focus();
