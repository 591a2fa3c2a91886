// The prompt box: streams an answer from the same API that everybody uses, and shows which tokens
// came from the prefix cache and how long each took, as this browser saw it.

const LATE_MS = [10, 25, 50, 100, 250]; // where the colours of tokens change
const QUESTION = "Why can a server for language models answer a prompt sooner if another one began "
  + "with the same words?";
const byId = (id) => document.getElementById(id);

let isSuited = false;
let running = null; // the AbortController of the answer that comes

export function setUpPrompt(getModel) {
  const names = LATE_MS.map((limit, index) => `${index ? "" : "latency of a token "}< ${limit} ms`);
  names.push(`≥ ${LATE_MS.at(-1)} ms`);
  byId("latencies").replaceChildren(...names.map((name, index) => {
    const item = document.createElement("li");
    const swatch = document.createElement("i");
    swatch.className = `late-${index}`;
    item.append(swatch, name);
    return item;
  }));
  byId("form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) ask(getModel());
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("form").requestSubmit();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  lookAtTokens(byId("answer"));
}

/** Has the box begin with a question, for a model that chats. What was typed already stays. */
export function suitPrompt() {
  if (isSuited) return;
  isSuited = true;
  if (byId("prompt").value !== byId("prompt").defaultValue) return;
  byId("prompt").value = QUESTION;
  document.querySelector("[name=kind][value=chat]").checked = true;
}

function question(model) {
  const text = byId("prompt").value;
  const isChat = new FormData(byId("form")).get("kind") === "chat";
  const input = isChat ? { messages: [{ role: "user", content: text }] } : { prompt: text };
  const sampling = {
    temperature: Number(byId("temperature").value),
    max_tokens: Number(byId("max-tokens").value),
    stream: true,
    stream_options: { include_usage: true },
    logprobs: isChat ? true : 0,
  };
  const path = isChat ? "/v1/chat/completions" : "/v1/completions";
  return [path, { model, ...input, ...sampling }, { model, ...input, return_token_strs: true }];
}

async function ask(model) {
  const [path, body, toTokenize] = question(model);
  const answer = new Answer();
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  byId("answer-panel").hidden = false;
  say("waiting for the first token");
  try {
    const promptTokens = post("/tokenize", toTokenize).then((response) => response.json());
    promptTokens.then((told) => showPrompt(told, null)).catch(() => {});
    answer.begin();
    const response = await post(path, body);
    for await (const event of events(response)) answer.take(event);
    say(answer.facts());
    showPrompt(await promptTokens, answer.usage);
  } catch (error) {
    const wasStopped = error.name === "AbortError";
    if (wasStopped) say(`stopped; ${answer.facts()}`);
    else say(error.message, true);
  } finally {
    running = null;
    byId("send").disabled = false;
    byId("stop").disabled = true;
  }
}

async function post(path, body) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal: running.signal,
  });
  if (!response.ok) {
    const told = await response.json().catch(() => ({}));
    throw new Error(told.error?.message ?? `the server answered ${response.status}`);
  }
  return response;
}

/** Yields the JSON objects of a stream of server-sent events. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/** An answer as it comes. */
class Answer {
  begin() {
    byId("answer").replaceChildren();
    byId("token-facts").textContent = "";
    this.began = this.last = performance.now();
    this.firstMs = null;
    this.gaps = []; // ms, of the tokens after the first
    this.pending = []; // tokens whose text is still to come, as of half a character
    this.usage = null;
    this.reason = "";
  }

  take(event) {
    this.usage = event.usage ?? this.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    this.reason = choice.finish_reason ?? this.reason;
    const { delta = {}, logprobs } = choice;
    const text = choice.text ?? `${delta.reasoning_content ?? ""}${delta.content ?? ""}`;
    const tokens = logprobs?.content
      ?? logprobs?.tokens?.map((token, i) => ({ token, logprob: logprobs.token_logprobs[i] }));
    const added = tokens ?? (text ? [{ token: text }] : []);
    const now = performance.now();
    for (const token of added) {
      token.ms = (now - this.last) / added.length;
      if (this.firstMs === null) {
        token.ms = this.firstMs = now - this.began;
        say("streaming");
      } else this.gaps.push(token.ms);
      this.pending.push(token);
    }
    if (added.length) this.last = now;
    if (text) this.show(text);
  }

  show(text) {
    const isSplit = this.pending.map(({ token }) => token).join("") === text;
    if (isSplit) for (const token of this.pending) this.append(token.token, [token]);
    else this.append(text, this.pending);
    this.pending = [];
  }

  append(text, tokens) {
    const span = document.createElement("span");
    span.textContent = text;
    const slowest = Math.max(0, ...tokens.map((token) => token.ms));
    const late = LATE_MS.findIndex((limit) => slowest < limit);
    span.className = `late-${late < 0 ? LATE_MS.length : late}`;
    const facts = tokens.map(({ ms, logprob }) => {
      const chance = logprob == null ? "" : `, probability ${(100 * Math.exp(logprob)).toFixed(1)} %`;
      return `${ms.toFixed(1)} ms${chance}`;
    });
    span.dataset.facts = `${JSON.stringify(text)}: ${facts.join("; ")}`;
    byId("answer").append(span);
  }

  facts() {
    const sorted = [...this.gaps].sort((a, b) => a - b);
    const at = (share) => sorted[Math.floor(share * (sorted.length - 1))].toFixed(1);
    const count = this.gaps.length + (this.firstMs === null ? 0 : 1);
    const seconds = (this.last - this.began) / 1e3;
    return [
      this.firstMs === null ? "" : `TTFT ${this.firstMs.toFixed(0)} ms`,
      sorted.length ? `ITL p50 ${at(0.5)} ms, p95 ${at(0.95)} ms` : "",
      `${count} tokens in ${seconds.toFixed(2)} s`,
      sorted.length ? `${(sorted.length / (seconds - this.firstMs / 1e3)).toFixed(0)} tokens/s` : "",
      this.reason ? `ended by ${this.reason}` : "",
    ].filter(Boolean).join(" · ");
  }
}

/** The bytes of a token by its name: its text, or "bytes:\\x20\\xf0" where it is none. */
function bytesOf(name) {
  if (!name.startsWith("bytes:\\x")) return new TextEncoder().encode(name);
  return Uint8Array.from(name.slice(8).split("\\x"), (byte) => parseInt(byte, 16));
}

/** The prompt's tokens; once the usage is known, with those marked that were cached. */
function showPrompt(told, usage) {
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const decoder = new TextDecoder(); // a character may be spread over tokens
  byId("prompt-tokens").replaceChildren(...told.token_strs.map((name, index) => {
    const span = document.createElement("span");
    span.textContent = decoder.decode(bytesOf(name), { stream: true });
    if (usage) span.className = index < cached ? "cached" : "computed";
    return span;
  }));
  byId("prompt-tokens-title").textContent = usage
    ? `Prompt: ${told.count} tokens, ${cached} from the prefix cache (green), the rest computed`
    : `Prompt: ${told.count} tokens`;
}

/** Shows the facts of the token that the pointer or the arrow keys are at. */
function lookAtTokens(panel) {
  const choose = (span) => {
    panel.querySelector(".chosen")?.classList.remove("chosen");
    span?.classList.add("chosen");
    byId("token-facts").textContent = span?.dataset.facts ?? "";
  };
  panel.addEventListener("pointerover", (event) => choose(event.target.closest("[data-facts]")));
  panel.addEventListener("keydown", (event) => {
    const now = panel.querySelector(".chosen");
    const next = { ArrowRight: now?.nextSibling ?? panel.firstChild, ArrowLeft: now?.previousSibling };
    if (!(event.key in next)) return;
    event.preventDefault();
    if (next[event.key]) choose(next[event.key]);
  });
}

function say(message, isBad = false) {
  byId("answer-status").textContent = message;
  byId("answer-status").classList.toggle("bad", isBad);
}
