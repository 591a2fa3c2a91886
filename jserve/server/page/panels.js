// Fills the parts of the page that are no canvases: numbers, requests, tenants, targets. Knows what
// the server tells and the document: no fetching.

import { classColour, ms, quantile } from "./charts.js";

const RATE_WINDOW_S = 10;
const byId = (id) => document.getElementById(id);
const text = (id, value) => { byId(id).textContent = value; };
const count = (value) => Math.round(value).toLocaleString("en");

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  made.className = className;
  made.append(...children);
  return made;
}

export const className = (name) => name || "no class";

export function showLimits(limits) {
  const { max_num_seqs: slots, max_num_batched_tokens: budget, page_size: size } = limits;
  text(
    "limits",
    `${count(slots)} slots · ${count(budget)} tokens a step · ${count(limits.num_pages)} pages of ` +
      `${size} tokens · policy ${limits.policy}`,
  );
}

export function showTiles(activity, steps) {
  const { limits, latency, now_s: now } = activity;
  const recent = steps.filter((step) => step.t_s > now - RATE_WINDOW_S);
  const isCut = recent.length === steps.length && activity.seq > steps.length;
  const seconds = isCut ? now - recent[0].t_s : Math.min(RATE_WINDOW_S, Math.max(now, 1));
  const rate = (field) => recent.reduce((sum, step) => sum + step[field], 0) / seconds;
  text("tile-output", count(rate("decode_rows")));
  text("tile-prompts", count(rate("prefill_tokens")));
  text("tile-running", count(activity.running));
  const { max_running: cap, reason } = activity.budget;
  const held = cap < limits.max_num_seqs ? `, held to ${cap}: ${reason}` : "";
  text("tile-slots", `of ${limits.max_num_seqs}${held}`);
  const waiting = activity.queue.reduce((sum, queue) => sum + queue.requests, 0);
  text("tile-waiting", count(waiting));
  const oldest = Math.max(0, ...activity.queue.map((queue) => queue.oldest_s));
  text("tile-oldest", waiting ? `oldest ${oldest.toFixed(1)} s` : "");
  for (const kind of ["ttft", "itl"]) {
    const value = quantile(latency[kind].counts, latency.bounds_s, 0.95);
    text(`tile-${kind}`, Number.isNaN(value) ? "–" : ms(value));
  }
  document.title = `${activity.running} running, ${waiting} waiting – jserve`;
}

export function showPages(pages) {
  for (const [kind, number] of Object.entries(pages)) text(`pages-${kind}`, count(number));
}

export function showLatency(kind, latency) {
  const { counts, targets } = latency[kind];
  const total = counts.reduce((sum, number) => sum + number, 0);
  const at = (share) => ms(quantile(counts, latency.bounds_s, share));
  const facts = total
    ? `p50 ${at(0.5)} · p95 ${at(0.95)} · p99 ${at(0.99)} · ${count(total)} in the last minute`
    : "none in the last minute";
  text(`${kind}-facts`, facts);
  byId(kind).setAttribute("aria-label", `Distribution: ${facts}`);
  const items = targets.map(({ class: name, target_s: target, met, missed }) => {
    const judged = met + missed;
    const share = judged ? `, met by ${((100 * met) / judged).toFixed(0)} % of ${count(judged)}` : "";
    const line = element("i", "", "┆ ");
    return element("li", "", line, `${className(name)}: target ${ms(target)}${share}`);
  });
  byId(`${kind}-targets`).replaceChildren(...items);
}

export function showClasses(classes) {
  const items = classes.map((name, index) => {
    const swatch = element("i", "");
    swatch.style.background = `var(--class-${classColour(index, classes.length)})`;
    return element("li", "", swatch, classes.length === 1 ? "waiting" : className(name));
  });
  byId("classes").replaceChildren(...items);
}

/** One bar per tenant, the longest queue first, its classes side by side. */
export function showTenants(queue, classes) {
  const tenants = new Map();
  for (const entry of queue) {
    tenants.set(entry.tenant, [...(tenants.get(entry.tenant) ?? []), entry]);
  }
  const total = (entries) => entries.reduce((sum, entry) => sum + entry.requests, 0);
  const sorted = [...tenants].sort((a, b) => total(b[1]) - total(a[1]));
  const most = sorted.length ? total(sorted[0][1]) : 1;
  const rows = sorted.map(([name, entries]) => {
    const bar = element("div", "bar");
    for (const entry of entries) {
      const part = element("i", "");
      part.style.width = `${(100 * entry.requests) / most}%`;
      const index = classes.indexOf(entry.class);
      part.style.background = `var(--class-${classColour(index, classes.length)})`;
      bar.append(part);
    }
    const label = element("span", "", name || "no tenant");
    const line = element("div", "line", label, element("span", "", count(total(entries))));
    const row = element("div", "", line, bar);
    row.setAttribute("role", "listitem");
    const parts = entries.map((entry) => `${entry.requests} of ${className(entry.class)}`);
    row.setAttribute("aria-label", `${name || "no tenant"}: ${parts.join(", ")}`);
    row.title = `${parts.join(", ")}; oldest ${Math.max(...entries.map((e) => e.oldest_s)).toFixed(1)} s`;
    return row;
  });
  byId("tenants").dataset.empty = "Nobody waits.";
  byId("tenants").replaceChildren(...rows);
}

const rows = new Map(); // of requests that are shown, by id

export function showRequests(activity) {
  const list = byId("requests");
  list.dataset.empty = "No requests. Send one below, or to /v1/completions.";
  const live = new Set(activity.requests.map((request) => request.id));
  for (const [id, row] of rows) {
    if (!live.has(id)) {
      row.remove();
      rows.delete(id);
    }
  }
  activity.requests.forEach((request, index) => {
    if (!rows.has(request.id)) rows.set(request.id, newRow(request));
    const row = rows.get(request.id);
    fill(row, request);
    if (list.children[index] !== row) list.insertBefore(row, list.children[index] ?? null);
  });
  const waiting = activity.queue.reduce((sum, queue) => sum + queue.requests, 0);
  const more = activity.running + waiting - activity.requests.length;
  text("requests-more", more > 0 ? `and ${count(more)} more` : "");
}

function newRow(request) {
  const whose = [request.class, request.tenant].filter(Boolean).join(" · ");
  const name = [element("span", "name", request.id), element("span", "whose", whose)];
  const bar = element("div", "bar", ...["", "", "", ""].map((none) => element("i", none)));
  ["--green", "--orange", "", "--blue"].forEach((colour, index) => {
    if (colour) bar.children[index].style.background = `var(${colour})`;
  });
  bar.setAttribute("role", "progressbar");
  bar.setAttribute("aria-valuemin", "0");
  const line = element("div", "line", ...name, element("span", "count"));
  const row = element("div", "request", line, bar);
  row.setAttribute("role", "listitem");
  return row;
}

function fill(row, request) {
  const { prompt_tokens: prompt, max_tokens: most, output_tokens: output } = request;
  const computed = Math.min(request.computed_tokens, prompt);
  const cached = Math.min(request.cached_tokens, computed);
  const isPrefill = computed < prompt && !output;
  let state = isPrefill ? `prompt ${count(computed)} / ${count(prompt)}`
    : `${count(output)} / ${count(most)}`;
  if (request.status !== "running") state = request.status;
  row.className = `request ${request.status}`;
  row.querySelector(".count").textContent = `${state} · ${request.age_s.toFixed(1)} s`;
  row.title = `${request.id}: priority ${request.priority}, ${count(prompt)} prompt tokens, ` +
    `${count(request.cached_tokens)} of them cached, preempted ${request.preemptions} times`;
  const room = Math.min(Math.max(prompt / (prompt + most), 0.12), 0.7); // so that both are seen
  const [ofPrompt, ofOutput] = [(100 * room) / prompt, (100 * (1 - room)) / most];
  const widths = [
    cached * ofPrompt, (computed - cached) * ofPrompt, (prompt - computed) * ofPrompt,
    output * ofOutput,
  ];
  const bar = row.lastElementChild;
  widths.forEach((width, index) => { bar.children[index].style.width = `${width}%`; });
  bar.setAttribute("aria-valuemax", String(prompt + most));
  bar.setAttribute("aria-valuenow", String(computed + output));
  bar.setAttribute("aria-label", `${request.id}: ${state}`);
}
