// The live page: asks the server twice a second what it does, keeps the last steps, and has them
// drawn. Knows when and what: not how.

import * as charts from "./charts.js";
import * as panels from "./panels.js";
import { setUpPrompt, suitPrompt } from "./prompt.js";

const POLL_MS = 500;
const MAX_DOUBLINGS = 3; // of that, after failures in a row
const ANSWER_WITHIN_MS = 8000;
const MAX_STEPS = 512;
const IDLE_AFTER_S = 2;
const MAX_NAMED = 3; // classes that are named in a tip

const byId = (id) => document.getElementById(id);
const STEP_CHARTS = ["steps", "times", "pages", "queue"].map(byId);

let steps = [];
let activity = null; // the newest one
let model = "";
let numFailures = 0;
let downSince = null;
let timer = 0;
let isPolling = false;
let chosen = null; // number of the step that is looked at
let asShare = false;
let colours = charts.readColours();

// ---- what the server tells ----------------------------------------------------------------------

async function poll() {
  if (isPolling) return;
  isPolling = true;
  clearTimeout(timer);
  const told = await ask();
  isPolling = false;
  numFailures = told ? 0 : numFailures + 1;
  const delay = POLL_MS * 2 ** Math.min(numFailures, MAX_DOUBLINGS);
  if (!document.hidden) timer = setTimeout(poll, delay);
  if (told) take(told);
}

/** Returns the server's state; or null, and says why there is none. */
async function ask() {
  let answer, body;
  try {
    answer = await fetch(`/debug/state?since=${activity?.seq ?? 0}`, {
      cache: "no-store", signal: AbortSignal.timeout(ANSWER_WITHIN_MS),
    });
    body = await answer.json();
  } catch {
    downSince ??= new Date();
    showStatus(
      "disconnected",
      `No answer from the server since ${downSince.toLocaleTimeString()}. What is shown is the last ` +
        "that it told. Trying again.",
    );
    return null;
  }
  downSince = null;
  if (answer.ok) return body;
  const why = body.error?.message ?? `the server answered ${answer.status}`;
  showStatus([401, 403].includes(answer.status) ? "refused" : "stuck", why);
  return null;
}

function take(state) {
  model = state.model || model;
  byId("model").textContent = model;
  if (state.is_chat_model) suitPrompt();
  if (state.activity && activity && state.activity.started !== activity.started) {
    const isPart = state.activity.seq >= activity.seq; // of another engine's steps: ask for all
    steps = [];
    activity = null;
    if (isPart) return;
  }
  if (state.activity) {
    keep(state.activity);
    redraw();
  }
  const lastStep = steps.at(-1);
  const idle = activity ? activity.now_s - (lastStep?.t_s ?? 0) : 0;
  if (state.status !== "serving" || state.reason) showStatus(state.status, state.reason);
  else if (!activity) showStatus("connecting", "");
  else if (activity.running || idle < IDLE_AFTER_S) showStatus("serving", "");
  else showStatus("idle", "");
}

function keep(told) {
  const fields = told.step_fields;
  const added = told.steps.map((values, index) => ({
    number: told.seq - told.steps.length + 1 + index,
    ...Object.fromEntries(fields.map((field, i) => [field, values[i]])),
  }));
  steps = [...steps, ...added].slice(-MAX_STEPS);
  activity = told;
}

function showStatus(status, reason) {
  document.body.dataset.status = status;
  if (byId("status").textContent !== status) byId("status").textContent = status;
  byId("banner").hidden = !reason;
  if (byId("banner").textContent !== reason) byId("banner").textContent = reason;
}

// ---- drawing ------------------------------------------------------------------------------------

let isDue = false;

function redraw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    if (activity) draw();
  });
}

const inView = () => steps.slice(-charts.roomFor(byId("steps")));

function draw() {
  const view = inView();
  const at = view.findIndex((step) => step.number === chosen);
  charts.drawSteps(byId("steps"), view, at, asShare, colours);
  charts.drawTimes(byId("times"), view, at, colours);
  charts.drawPages(byId("pages"), view, at, activity.limits.num_pages, colours);
  charts.drawQueue(byId("queue"), view, at, colours);
  const perCell = charts.drawPool(byId("pool"), activity.pages, colours);
  for (const kind of ["ttft", "itl"]) {
    const { counts, targets } = activity.latency[kind];
    const { bounds_s: bounds } = activity.latency;
    charts.drawDistribution(byId(kind), counts, bounds, targets, colours);
    panels.showLatency(kind, activity.latency);
  }
  panels.showLimits(activity.limits);
  panels.showTiles(activity, steps);
  panels.showPages(activity.pages);
  panels.showClasses(activity.classes);
  panels.showTenants(activity.queue, activity.classes);
  panels.showRequests(activity);
  label(view, perCell);
}

const ago = (seconds) =>
  seconds < 100 ? `${seconds.toFixed(1)} s ago` : `${(seconds / 60).toFixed(0)} min ago`;

function label(view, perCell) {
  const last = view.at(-1);
  const age = (step) => ago(activity.now_s - step.t_s);
  byId("steps-from").textContent = last ? age(view[0]) : "No steps yet: send a request.";
  byId("steps-count").textContent = last ? `${view.length} steps` : "";
  byId("steps-to").textContent = last ? age(last) : "";
  const { used, cached, free } = activity.pages;
  const facts = last ? describe(last).replaceAll("\n", "; ") : "no steps yet";
  byId("steps").ariaLabel = `The last ${view.length} steps. Arrow keys choose one. Newest: ${facts}`;
  byId("times").ariaLabel = `How long each step took; the newest ${last ? charts.ms(last.step_s) : "none"}`;
  const pages = `${used} KV pages used, ${cached} cached, ${free} free`;
  byId("pages").ariaLabel = `Pages at each step. Now: ${pages}`;
  byId("pool").ariaLabel = `The pool, ${perCell} pages to a cell: ${pages}`;
  const waiting = activity.queue.reduce((sum, queue) => sum + queue.requests, 0);
  byId("queue").ariaLabel = `Waiting requests at each step, by class. Now: ${waiting}`;
}

function describe(step) {
  const padding = step.bucket_tokens - step.decode_rows - step.prefill_tokens;
  const waiting = step.waiting.reduce((sum, count) => sum + count, 0);
  const named = activity.classes
    .map((name, index) => [panels.className(name), step.waiting[index]])
    .filter(([, count]) => count)
    .slice(0, MAX_NAMED)
    .map(([name, count]) => `${name} ${count}`);
  return [
    `step ${step.number}: ${charts.ms(step.step_s)}, bucket of ${step.bucket_tokens}`,
    `${step.decode_rows} decode rows, ${step.prefill_tokens} prompt tokens in ${step.chunks} ` +
      `chunk${step.chunks === 1 ? "" : "s"}, ${padding} padding`,
    `pages: ${step.pages_used} used, ${step.pages_cached} cached, ${step.pages_free} free`,
    `${step.running} running, ${waiting} waiting${named.length ? ` (${named.join(", ")})` : ""}`,
    ...(step.preemptions ? [`${step.preemptions} preempted`] : []),
  ].join("\n");
}

// ---- looking at one step ------------------------------------------------------------------------

function choose(number, canvas) {
  chosen = number;
  const view = inView();
  const index = view.findIndex((step) => step.number === number);
  const tip = byId("tip");
  tip.hidden = index < 0;
  if (index >= 0) {
    tip.textContent = describe(view[index]);
    const box = canvas.getBoundingClientRect();
    const x = box.left + charts.placeOf(canvas, index, view.length);
    tip.style.left = `${Math.max(8, Math.min(x + 12, innerWidth - tip.offsetWidth - 8))}px`;
    const above = box.top - tip.offsetHeight - 6;
    tip.style.top = `${above > 4 ? above : box.bottom + 6}px`;
  }
  redraw();
}

for (const canvas of STEP_CHARTS) {
  canvas.addEventListener("pointermove", (event) => point(event, canvas));
  canvas.addEventListener("pointerdown", (event) => point(event, canvas));
  canvas.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") choose(null, canvas);
  });
  canvas.addEventListener("blur", () => choose(null, canvas));
  canvas.addEventListener("keydown", (event) => {
    const view = inView();
    if (event.key === "Escape") choose(null, canvas);
    if (!["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key) || !view.length) return;
    event.preventDefault();
    const now = view.findIndex((step) => step.number === chosen);
    const last = view.length - 1;
    const next = { Home: 0, End: last, ArrowLeft: now < 0 ? last : now - 1, ArrowRight: now + 1 };
    const index = Math.min(Math.max(next[event.key], 0), last);
    choose(view[index].number, canvas);
  });
}

function point(event, canvas) {
  const view = inView();
  const index = charts.stepAt(canvas, event.offsetX, view.length);
  choose(view[index]?.number ?? null, canvas);
}

byId("share").addEventListener("click", () => {
  asShare = !asShare;
  byId("share").ariaPressed = String(asShare);
  redraw();
});

// ---- the life of the page -----------------------------------------------------------------------

document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else poll();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours = charts.readColours();
  redraw();
});
new ResizeObserver(redraw).observe(document.body);
setUpPrompt(() => model);
poll();
