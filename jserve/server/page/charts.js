// Draws on canvases: steps, pages, the queue, distributions. Knows numbers and colours: no server,
// and of the document only the canvas it is given.

const LEFT = 46; // pixels for the numbers of the y axis
const PITCH = 3; // pixels of a step and the gap behind it, at least
const MAX_PITCH = 8;
const PAUSE_S = 2; // between two steps, that is said
const MIN_BUCKETS = 7;
const TARGET_LINE = 13; // pixels for the words of a target
const MAX_CLASSES = 4; // that have colours of their own

export const ms = (seconds) => {
  const value = seconds * 1e3;
  if (value >= 10_000) return `${(value / 1e3).toFixed(0)} s`;
  if (value >= 1_000) return `${(value / 1e3).toFixed(1)} s`;
  return `${value >= 99.5 ? value.toFixed(0) : value.toPrecision(2)} ms`;
};

export function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ink", "soft", "line", "card", "blue", "orange", "green", "empty", "bad"];
  const colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`)]));
  colours.classes = [0, 1, 2, 3, 4].map((i) => style.getPropertyValue(`--class-${i}`));
  return colours;
}

/** Where the colour of class number `index` is: requests without a class are grey beside others. */
export function classColour(index, count) {
  if (count === 1) return 0;
  return index > 0 && index <= MAX_CLASSES ? index - 1 : MAX_CLASSES;
}

/** How many steps a canvas has room for. */
export const roomFor = (canvas) => Math.max(Math.floor((canvas.clientWidth - LEFT) / PITCH), 1);

/** Which of `count` steps is at `x` pixels from the canvas's left edge; they stand at the right. */
export function stepAt(canvas, x, count) {
  return Math.floor((x - placeOf(canvas, 0, count)) / pitchOf(canvas, count));
}

/** Where step number `index` of `count` begins, in pixels from the canvas's left edge. */
export const placeOf = (canvas, index, count) =>
  canvas.clientWidth - (count - index) * pitchOf(canvas, count);

function pitchOf(canvas, count) {
  return Math.min((canvas.clientWidth - LEFT) / Math.max(count, 1), MAX_PITCH);
}

function begin(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  return [context, width, height];
}

function axis(context, width, height, top, label, colours) {
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const share of [0, 0.5, 1]) {
    const y = Math.round((height - 1) * (1 - share)) + 0.5;
    context.strokeStyle = colours.line;
    context.beginPath();
    context.moveTo(LEFT, y);
    context.lineTo(width, y);
    context.stroke();
    context.fillStyle = colours.soft;
    const inside = Math.min(Math.max(y, 6), height - 6);
    if (share || height > 80) context.fillText(label(top * share), LEFT - 5, inside);
  }
}

/** Draws one bar per step, of `layers(step)`, pairs of a value and a colour, the lowest first. */
function bars(canvas, steps, top, chosen, colours, label, layers, bottom = 0) {
  const [context, width, whole] = begin(canvas);
  const height = whole - bottom;
  axis(context, width, height, top, label, colours);
  const pitch = pitchOf(canvas, steps.length);
  const gap = pitch >= PITCH ? 1 : 0; // where there is room for it
  steps.forEach((step, index) => {
    const x = Math.round(width - (steps.length - index) * pitch);
    const next = Math.round(width - (steps.length - index - 1) * pitch);
    if (index === chosen) {
      context.fillStyle = colours.line;
      context.fillRect(x - 1, 0, next - x + 1, whole);
    }
    let y = height;
    for (const [value, colour] of layers(step)) {
      if (value <= 0) continue;
      const size = Math.max((value / top) * height, 2); // what is there is seen
      context.fillStyle = colour;
      context.fillRect(x, y - size, next - x - gap, size > 4 ? size - gap : size);
      y -= size;
    }
  });
  return [context, width, whole, pitch];
}

const percent = (share) => `${(share * 100).toFixed(0)} %`;
const whole = (value) => (value >= 10_000 ? `${(value / 1e3).toFixed(0)}k` : value.toFixed(0));

function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(value, 1e-6)));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((n) => n * unit >= value * 0.9999) * unit;
}

export function drawSteps(canvas, steps, chosen, asShare, colours) {
  const largest = Math.max(...steps.map((step) => step.bucket_tokens), 8);
  const label = asShare ? percent : whole;
  const layers = (step) => {
    const unit = asShare ? step.bucket_tokens : 1;
    const real = step.decode_rows + step.prefill_tokens;
    return [
      [step.decode_rows / unit, colours.blue],
      [step.prefill_tokens / unit, colours.orange],
      [(step.bucket_tokens - real) / unit, colours.empty],
    ];
  };
  const mark = 9; // room for what was preempted
  const top = asShare ? 1 : largest;
  const [context, width, height, pitch] = bars(
    canvas, steps, top, chosen, colours, label, layers, mark,
  );
  steps.forEach((step, index) => {
    const x = width - (steps.length - index - 0.5) * pitch;
    const pause = index ? step.t_s - step.step_s - steps[index - 1].t_s : 0;
    if (pause > PAUSE_S) {
      context.fillStyle = colours.soft;
      context.fillRect(x - pitch / 2 - 1, 0, 1, height - mark);
      context.textAlign = index > 20 ? "right" : "left";
      context.fillText(`${pause.toFixed(0)} s idle`, x - (index > 20 ? 6 : -4), 8);
    }
    if (!step.preemptions) return;
    context.fillStyle = colours.bad;
    context.beginPath();
    context.moveTo(x, height - mark + 1);
    context.lineTo(x + 4, height);
    context.lineTo(x - 4, height);
    context.fill();
  });
}

export function drawTimes(canvas, steps, chosen, colours) {
  const top = roundUp(Math.max(...steps.map((step) => step.step_s), 1e-3));
  bars(canvas, steps, top, chosen, colours, ms, (step) => [[step.step_s, colours.soft]]);
}

export function drawPages(canvas, steps, chosen, numPages, colours) {
  bars(canvas, steps, numPages, chosen, colours, whole, (step) => [
    [step.pages_used, colours.blue],
    [step.pages_cached, colours.green],
  ]);
}

export function drawQueue(canvas, steps, chosen, colours) {
  const total = (step) => step.waiting.reduce((sum, count) => sum + count, 0);
  const top = roundUp(Math.max(...steps.map(total), 4));
  bars(canvas, steps, top, chosen, colours, whole, (step) =>
    step.waiting.map((count, index) => [
      count, colours.classes[classColour(index, step.waiting.length)],
    ]),
  );
}

/** The pool as cells, each of as many pages as it takes for all to be seen. */
export function drawPool(canvas, pages, colours) {
  const [context, width, height] = begin(canvas);
  const total = pages.used + pages.cached + pages.free;
  const most = Math.max(Math.floor((width * height) / 64), 1);
  const perCell = Math.max(Math.ceil(total / most), 1);
  const count = Math.ceil(total / perCell);
  const columns = Math.max(Math.ceil(Math.sqrt((count * width) / height)), 1);
  const size = Math.min(width / columns, height / Math.ceil(count / columns));
  const upTo = (n) => Math.ceil(n / perCell);
  const [used, cached] = [upTo(pages.used), upTo(pages.used + pages.cached)];
  for (let cell = 0; cell < count; cell++) {
    context.fillStyle = cell < used ? colours.blue : cell < cached ? colours.green : colours.empty;
    const [x, y] = [(cell % columns) * size, Math.floor(cell / columns) * size];
    context.fillRect(x, y, Math.max(size - 1, 1), Math.max(size - 1, 1));
  }
  return perCell;
}

/** The seconds below which `share` of the observations are, as Prometheus works them out. */
export function quantile(counts, bounds, share) {
  const wanted = counts.reduce((sum, count) => sum + count, 0) * share;
  let below = 0;
  for (let i = 0; i < counts.length; i++) {
    if (counts[i] && below + counts[i] >= wanted) {
      if (i === bounds.length) return bounds[i - 1];
      const low = i ? bounds[i - 1] : 0;
      return low + ((bounds[i] - low) * (wanted - below)) / counts[i];
    }
    below += counts[i];
  }
  return NaN;
}

/** A distribution over buckets that end at `bounds`, with a line for each target. */
export function drawDistribution(canvas, counts, bounds, targets, colours) {
  const [context, width, height] = begin(canvas);
  const [roof, floor] = [TARGET_LINE * targets.length, height - 16];
  const place = (seconds) => { // in buckets from the left; each is as wide as the others
    const i = bounds.findIndex((bound) => seconds <= bound);
    if (i < 0) return bounds.length;
    if (!i) return Math.max(seconds / bounds[0], 0.05);
    return i + Math.log(seconds / bounds[i - 1]) / Math.log(bounds[i] / bounds[i - 1]);
  };
  const shown = counts.flatMap((count, i) => (count ? [i] : []));
  const lines = targets.map((target) => Math.min(Math.floor(place(target.target_s)), bounds.length));
  const seen = shown.length + lines.length ? [...shown, ...lines] : [3, 9];
  let [from, to] = [Math.min(...seen) - 1, Math.max(...seen) + 1];
  for (; to - from < MIN_BUCKETS; to++) from -= from > 0 ? 1 : 0;
  [from, to] = [Math.max(from, 0), Math.min(to, bounds.length)];
  const pitch = (width - LEFT) / (to - from + 1);
  const total = counts.reduce((sum, count) => sum + count, 0);
  const top = total ? Math.max(...counts) / total : 1;
  context.translate(0, roof);
  axis(context, width, floor - roof, top, percent, colours);
  context.translate(0, -roof);
  context.textAlign = "center";
  for (let i = from; i <= to; i++) {
    const x = LEFT + (i - from) * pitch;
    const size = total && counts[i] ? Math.max((counts[i] / total / top) * (floor - roof), 2) : 0;
    context.fillStyle = colours.blue;
    context.fillRect(x + 1, floor - size, pitch - 2, size);
    context.fillStyle = colours.soft;
    if (i < to && (pitch > 44 || (i - from) % 2 === 0)) {
      context.fillText(ms(bounds[i]), Math.min(x + pitch, width - 18), height - 6);
    }
  }
  targets.forEach((target, index) => {
    const x = LEFT + (place(target.target_s) - from) * pitch;
    context.strokeStyle = context.fillStyle = colours.bad;
    context.setLineDash([4, 3]);
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(x, TARGET_LINE * index + 2);
    context.lineTo(x, floor);
    context.stroke();
    context.setLineDash([]);
    const isLate = x > width - 110;
    context.textAlign = isLate ? "right" : "left";
    const text = `${target.class || "target"} ${ms(target.target_s)}`;
    context.fillText(text, isLate ? x - 4 : x + 4, 7 + TARGET_LINE * index);
  });
  context.lineWidth = 1;
}
