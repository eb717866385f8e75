"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { file, levels, layers, full } = data;
  const T = levels.length;
  const LAYOUTS = ["dense", "bitmask", "CSR"];
  const MOST_CELLS = 10; // levels that still get a column each; more become a strip
  const MOST_ROWS = 1000; // layers drawn before the reader asks for the rest

  // ---------------------------------------------------------------- elements and words

  const $ = (id) => document.getElementById(id);

  // Names come from the file, so text is only ever set as text, never parsed as HTML.
  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    return fill(element, attributes, children);
  }
  function svg(tag, attributes, ...children) {
    return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  }
  function fill(element, attributes, children) {
    for (const [key, value] of Object.entries(attributes || {})) {
      if (value !== undefined && value !== null && value !== false) element.setAttribute(key, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  // Control and direction characters would let a name rearrange the text around it.
  const printable = (text) =>
    text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (c) => `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`);
  function short(text, most = 160) {
    const safe = printable(text);
    return safe.length > most ? `${safe.slice(0, most - 1)}…` : safe;
  }
  // Long names break after their separators first.
  const isolated = (text, most) =>
    make("bdi", {}, ...short(text, most).split(/(?<=[/._:-])(?=[^/._:-])/).flatMap((part, i) => (i ? [make("wbr"), part] : [part])));

  const count = (n) => n.toLocaleString("en-US");
  function size(bytes) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let at = 0;
    while (bytes >= 999.5 && at < units.length - 1) { bytes /= 1000; at += 1; }
    return `${at ? bytes.toPrecision(3) : bytes} ${units[at]}`;
  }
  function compact(n) {
    if (n < 10000) return count(n);
    const units = ["", " k", " M", " G", " T"];
    let at = 0;
    while (n >= 999.5 && at < units.length - 1) { n /= 1000; at += 1; }
    return n.toPrecision(3) + units[at];
  }
  // As many digits as tell 99.5 % from 99.95 %, and no more.
  function digitsFor(fraction) {
    const edge = 100 * Math.min(fraction, 1 - fraction);
    if (edge <= 0) return 0;
    return edge >= 10 ? 1 : edge >= 0.1 ? 2 : Math.min(6, 1 - Math.floor(Math.log10(edge)));
  }
  const percent = (fraction, digits = digitsFor(fraction)) => `${(100 * fraction).toFixed(digits)} %`;
  // What was asked for, or an axis: no more digits than it has.
  const axisPercent = (fraction) => `${Number((100 * fraction).toPrecision(6))} %`;
  const axisCount = (n) => { const [value, unit] = compact(n).split(" "); return [n < 10000 ? value : Number(value), unit].join(" ").trim(); };
  const axisSize = (bytes) => { const [value, unit] = size(bytes).split(" "); return bytes ? `${Number(value)} ${unit}` : "0"; };
  function whole(fraction) {
    const value = 100 * fraction;
    return value >= 9.95 || value === 0 ? value.toFixed(0) : value >= 0.995 ? value.toFixed(1) : value.toFixed(2);
  }
  const number = (x) => (Number.isInteger(x) && Math.abs(x) < 1e9 ? String(x) : String(Number(x.toPrecision(5))));
  // Two digits of a standard error tell enough, as in elsa-bench.
  function measure(value, error) {
    if (error === null) return number(value);
    if (error < 1e-6) return `${number(value)} ± ${Number(error.toPrecision(2))}`;
    const places = Math.max(1 - Number(error.toExponential(1).split("e")[1]), 0);
    return `${value.toFixed(places)} ± ${error.toFixed(places)}`;
  }
  const shape = (dims) => (dims.length ? dims.join(" × ") : "scalar");
  const share = (part, all) => (all ? part / all : 0);
  const levelName = (t, most = 40) => `Level ${t} · ${short(levels[t - 1].name, most)}`;
  const stepName = (t) => (t ? `step ${t}` : "dense only");

  // ---------------------------------------------------------------- colours

  // Lightness runs one way along every ramp, so that order survives colour blindness and grey print.
  const RAMPS = {
    light: {
      steps: ["#282162", "#163d7a", "#005981", "#007385", "#008d88", "#24a781", "#6fb973", "#acc867", "#e5d367"],
      heat: ["#edf5fb", "#ccddeb", "#acc6dc", "#8eaecd", "#7296be", "#577faf", "#3e67a0", "#264f91", "#123781"],
      dense: "#e3e3df",
      absent: "#fbfbfa",
    },
    dark: {
      steps: ["#f9eb80", "#c1e482", "#85d991", "#3fc9a3", "#08b3b2", "#009bb7", "#0382bd", "#3e66b3", "#534a9c"],
      heat: ["#232b3a", "#294061", "#2b5788", "#2d70aa", "#378ac5", "#50a5da", "#75bee7", "#a2d6f0", "#d4edf7"],
      dense: "#3d4249",
      absent: "#1b1d20",
    },
  };
  let theme = "light";
  const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  function along(ramp, position) {
    const at = Math.min(Math.max(position, 0), 1) * (ramp.length - 1);
    const low = Math.min(Math.floor(at), ramp.length - 2);
    const [from, to] = [parts(ramp[low]), parts(ramp[low + 1])];
    return from.map((c, i) => Math.round(c + (to[i] - c) * (at - low)));
  }
  const css = (rgb) => `rgb(${rgb.join(" ")})`;
  // A few levels use the ramp's inner part too: three of them are its start, middle and end.
  const stepRgb = (t) => (t ? along(RAMPS[theme].steps, T > 1 ? (t - 1) / (T - 1) : 0.25) : parts(RAMPS[theme].dense));
  const stepColour = (t) => css(stepRgb(t));

  let mostKept = 0;
  for (const layer of layers) if (layer.weights && T) mostKept = Math.max(mostKept, layer.kept[T - 1] / layer.weights);
  mostKept = mostKept || 1;
  // The square root spreads the small shares, where sparse levels live.
  const heatRgb = (fraction) => along(RAMPS[theme].heat, Math.sqrt(fraction / mostKept));
  function inkOn([r, g, b]) {
    const [x, y, z] = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    const light = 0.2126 * x + 0.7152 * y + 0.0722 * z;
    return light > 0.179 ? "#111417" : "#ffffff";
  }

  // ---------------------------------------------------------------- tooltip

  const tip = $("tip");
  function showTip(lines, x, y) {
    tip.replaceChildren(...lines.map((line, i) => make(i ? "span" : "b", {}, line)));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 14 + box.width > innerWidth - 8 ? x - 14 - box.width : x + 14;
    const top = y + 14 + box.height > innerHeight - 8 ? y - 14 - box.height : y + 14;
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - box.width - 8))}px`;
    tip.style.top = `${Math.max(8, top)}px`;
  }
  const hideTip = () => { tip.hidden = true; };
  const say = (lines) => { $("live").textContent = lines.join(", "); };
  addEventListener("scroll", hideTip, { passive: true, capture: true });
  addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

  // ---------------------------------------------------------------- header

  function drawHead() {
    $("file-name").textContent = short(file.name, 200);
    const nested = layers.length;
    const nestedIn = T === 1 ? "One sparse network" : `${T} sparse networks`;
    const carry = `${count(nested)} of its ${count(file.tensors)} tensors carry counters.`;
    const part = file.shard ? ` This is shard ${file.shard[0]} of ${file.shard[1]}; all numbers are of this shard.` : "";
    $("summary").textContent = `${nestedIn} nested in one dense network. ${carry}${part}`;
    const ends = T > 1 ? `${percent(sparsities[T - 1], digits).slice(0, -2)}–${percent(sparsities[0], digits)}` : percent(sparsities[0], digits);
    const facts = [
      ["File size", size(file.size), `${count(file.size)} bytes`],
      ["Parameters", compact(file.parameters), count(file.parameters)],
      ["Nested weights", compact(file.weights), `${percent(share(file.weights, file.parameters))} of parameters`],
      ["Levels", count(T), `sparsity ${ends}`],
      ["Counter bits", `τ = ${file.bits}`, `room for ${2 ** file.bits - 1} ${file.bits > 1 ? "levels" : "level"}`],
      ["Format", `ELSA ${file.version}`, full ? "header and data read" : "header read"],
    ];
    $("facts").replaceChildren(
      ...facts.map(([term, value, more]) => make("div", {}, make("dt", {}, term), make("dd", {}, value, make("small", {}, more)))),
    );
  }

  // ---------------------------------------------------------------- levels

  const sparsities = levels.map((level) => 1 - share(level.kept, file.weights));
  const digits = Math.min(Math.max(...sparsities.map(digitsFor)), 4);
  const networks = [...levels, data.dense];
  const metrics = [...new Set(networks.flatMap((level) => Object.keys(level.metrics)))].sort();
  const own = (values, name) => (Object.hasOwn(values, name) ? values[name] : null);
  const downloads = data.downloads ?? data.estimates; // of the dense network last

  function drawLevels() {
    const digests = levels.some((level) => level.digest);
    const swatch = (t) => { const box = make("span", { class: "swatch" }); box.style.background = stepColour(t); return box; };
    const cell = (text, kind = "num") => make("td", { class: kind }, text);
    const head = ["Level", "Name", "Sparsity", "Kept", ...LAYOUTS.map((name) => `As ${name}`), data.downloads ? "Download" : "Download, about"];
    const asked = (level) => {
      if (level.pattern) return make("span", { class: "sub" }, `asked for ${level.pattern}`);
      const named = /^\s*([\d.]+)\s*%\s*$/.exec(level.name); // most names are the target, rounded
      if (level.target === null || (named && Math.abs(Number(named[1]) - 100 * level.target) < 0.006)) return null;
      return make("span", { class: "sub" }, `asked for ${axisPercent(level.target)}`);
    };
    const row = (label, t, name, asks, kept, sizes, found, digest) =>
      make("tr", {},
        make("th", { scope: "row" }, swatch(t), label),
        make("td", { class: "name" }, name, asks),
        cell(percent(1 - share(kept, file.weights), digits)),
        cell(count(kept)),
        ...sizes.map((bytes) => cell(bytes === null ? "–" : size(bytes))),
        ...metrics.map((metric) => cell(own(found.metrics, metric) === null ? "–" : measure(found.metrics[metric], own(found.errors, metric)))),
        digests ? make("td", { class: "digest", title: digest || undefined }, digest ? digest.slice(7, 15) : "–") : null,
      );
    $("level-table").replaceChildren(
      make("thead", {}, make("tr", {},
        ...head.map((text, i) => make("th", { scope: "col", class: i > 1 ? "num" : undefined }, text)),
        ...metrics.map((metric) => make("th", { scope: "col", class: "num" }, isolated(metric, 28))),
        digests ? make("th", { scope: "col" }, "Digest") : null)),
      make("tbody", {}, ...levels.map((level, i) =>
        row(String(i + 1), i + 1, isolated(level.name, 80), asked(level), level.kept, [...level.sizes, downloads[i]], level, level.digest))),
      make("tfoot", {}, row("dense", 0, "the file as it is", null, file.weights, [data.dense.size, null, null, downloads[T]], data.dense, null)),
    );
  }

  // ---------------------------------------------------------------- charts

  function niceStep(span, about) {
    const raw = span / about;
    const power = 10 ** Math.floor(Math.log10(raw));
    return power * ([1, 2, 2.5, 5, 10].find((m) => m * power >= raw * 0.999) || 10);
  }
  function ticks(low, high, about) {
    const step = niceStep(high - low, about);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) found.push(Number((k * step).toPrecision(12)));
    return found;
  }

  // Charts are drawn for the width they have, so that text keeps its size on a phone.
  const charts = new Map();
  const resized = new ResizeObserver((entries) => {
    const changed = entries.filter(({ target }) => charts.get(target.id).width !== Math.floor(target.clientWidth));
    if (changed.length) requestAnimationFrame(() => { hideTip(); changed.forEach(({ target }) => drawChart(target.id)); });
  });
  function chart(id, draw) {
    charts.set(id, { draw, width: 0 });
    drawChart(id);
    resized.observe($(id));
  }
  function drawChart(id) {
    const box = $(id);
    const entry = charts.get(id);
    entry.width = Math.floor(box.clientWidth);
    if (entry.width > 0) entry.draw(box, entry.width);
  }

  // One horizontal position per item: the pointer or the arrow keys choose the nearest.
  function explore(root, items, marker) {
    let at = -1;
    const choose = (next, x, y, spoken) => {
      at = next;
      marker.replaceChildren(...items[at].marks());
      const lines = items[at].lines();
      showTip(lines, x, y);
      if (spoken) say(lines);
    };
    const leave = () => { marker.replaceChildren(); hideTip(); };
    const nearest = (event) => {
      const x = event.clientX - root.getBoundingClientRect().left;
      let best = 0;
      items.forEach((item, i) => { if (Math.abs(item.x - x) < Math.abs(items[best].x - x)) best = i; });
      choose(best, event.clientX, event.clientY, false);
    };
    root.addEventListener("pointermove", nearest);
    root.addEventListener("pointerdown", nearest);
    root.addEventListener("pointerleave", leave);
    root.addEventListener("blur", leave);
    root.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: at + 1, ArrowLeft: at < 0 ? 0 : at - 1, Home: 0, End: items.length - 1 };
      if (!(event.key in moves) || !items.length) return;
      event.preventDefault();
      const next = Math.min(Math.max(moves[event.key], 0), items.length - 1);
      const box = root.getBoundingClientRect();
      choose(next, box.left + items[next].x, box.top + items[next].y, true);
    });
  }

  function frame(width, height, label) {
    return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": label });
  }
  function verticalAxis(root, margin, width, height, low, high, format) {
    const y = (value) => height - margin.bottom - ((value - low) / (high - low)) * (height - margin.top - margin.bottom);
    for (const tick of ticks(low, high, 5)) {
      root.append(
        svg("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: y(tick), y2: y(tick) }),
        svg("text", { x: margin.left - 8, y: y(tick) + 4, "text-anchor": "end" }, format(tick)),
      );
    }
    return y;
  }
  const baseline = (margin, width, height) =>
    svg("line", { class: "axis", x1: margin.left, x2: width - margin.right, y1: height - margin.bottom, y2: height - margin.bottom });
  // Labels are about 6.6 px a character at 12 px.
  const room = (labels) => Math.max(...labels.map((label) => label.length)) * 6.6 + 14;

  // ---------------------------------------------------------------- trade-off

  let axis = "log";
  const MARKS = [
    (x, y) => svg("circle", { cx: x, cy: y, r: 4 }),
    (x, y) => svg("rect", { x: x - 3.6, y: y - 3.6, width: 7.2, height: 7.2 }),
    (x, y) => svg("path", { d: `M${x} ${y - 5}L${x + 5} ${y + 4}H${x - 5}Z` }),
    (x, y) => svg("path", { d: `M${x} ${y - 6}L${x + 6} ${y}L${x} ${y + 6}L${x - 6} ${y}Z` }),
  ];
  const OPEN = 0; // of MARKS: a level that another beats
  const DIAMOND = 3; // of MARKS: a level that no other beats

  // What a metric is drawn over. More sparsity is better, and less of all else. Times need not
  // follow the order of the levels, so no line joins them.
  const SPARSITY = { name: "sparsity", sign: 1, values: [...sparsities, 0], show: (s) => percent(s) };
  const milliseconds = networks.map((_, i) => {
    const row = data.measured.find(({ level }) => level === (i < T ? i + 1 : "dense"));
    return row ? 1000 * (row.fast_seconds ?? row.dense_seconds) : null;
  });
  const overs = [
    SPARSITY,
    ...[1, 2].map((i) => ({ name: `bytes as ${LAYOUTS[i]}`, sign: -1, values: [...levels.map((level) => level.sizes[i]), data.dense.size], show: size, format: axisSize })),
    { name: data.downloads ? "download" : "estimated download", sign: -1, values: downloads, show: size, format: axisSize },
    ...(data.measured.length ? [{ name: "milliseconds", sign: -1, scattered: true, values: milliseconds, show: (ms) => `${Number(ms.toPrecision(4))} ms`, format: number }] : []),
  ];

  // The paper's axis: sparsity, spaced by the logarithm of the number of weights kept.
  function horizontal(margin, width) {
    const least = 0.5 / Math.max(file.weights, 1);
    const place = (s) => (axis === "log" ? -Math.log10(Math.max(1 - s, least)) : s);
    const all = sparsities.map(place);
    let [low, high] = [Math.min(...all), Math.max(...all)];
    const pad = high > low ? (high - low) * 0.04 : axis === "log" ? 0.3 : 0.05;
    low -= pad;
    high += pad;
    if (axis === "linear") { low = Math.max(low, 0 - pad / 2); high = Math.min(high, 1 + pad / 2); }
    const x = (s) => margin.left + ((place(s) - low) / (high - low)) * (width - margin.left - margin.right);
    let marks = axis === "linear" ? ticks(Math.max(low, 0), Math.min(high, 1), width / 80) : [];
    if (axis === "log") {
      const candidates = [0];
      for (let nines = 0; nines < 9; nines += 1) {
        for (const kept of [8, 7, 6, 5, 4, 3, 2, 1.5, 1]) candidates.push(1 - kept * 10 ** -(nines + 1));
      }
      // Where labels would touch, the rounder sparsity stays.
      const roundness = (s) => [1, 5, 2, 10].findIndex((m) => Math.abs(place(s) % 1 - Math.log10(10 / (m % 10 || 10)) % 1) < 1e-6);
      const rank = (s) => { const found = roundness(s); return found < 0 ? 9 : found; };
      const inside = candidates.filter((c) => place(c) >= low && place(c) <= high).sort((a, b) => rank(a) - rank(b));
      const round = inside.filter((c) => rank(c) < 9);
      const taken = [];
      for (const s of round.length > 2 ? round : inside) {
        if (taken.every((other) => Math.abs(x(other) - x(s)) > 26 + 3.4 * (axisPercent(s).length + axisPercent(other).length) / 2)) taken.push(s);
      }
      marks = taken;
    }
    return { x, marks };
  }

  function plainAxis({ values, format }, margin, width) {
    const known = values.filter((value) => value !== null);
    const [low, high] = padded(Math.min(...known), Math.max(...known), 0.06);
    const x = (value) => margin.left + ((value - low) / (high - low)) * (width - margin.left - margin.right);
    return { x, marks: ticks(Math.max(low, 0), high, (width - margin.left) / 90) };
  }
  // Equal values get room, and so do those whose difference no tick could show.
  function padded(low, high, part) {
    const most = Math.max(Math.abs(low), Math.abs(high));
    const span = high - low > most * 1e-9 ? high - low : most * 0.1 || 1;
    return [low - span * part, high + span * part];
  }

  function lineChart(box, width, options) {
    const { series, references, format, fromZero, label, over = SPARSITY } = options;
    const height = Math.round(Math.min(Math.max(width * 0.6, 230), 320));
    const bar = (line, i) => line.errors?.[i] ?? 0;
    const drawn = series.flatMap((line) => line.values.flatMap((v, i) => (v === null ? [] : [v - bar(line, i), v + bar(line, i)])));
    const values = [...drawn, ...references.map((r) => r.value)];
    let [low, high] = padded(Math.min(...values), Math.max(...values), 0.12);
    if (fromZero) low = 0;
    const margin = { left: Math.max(room(ticks(low, high, 5).map(format)), 40), right: 14, top: 12, bottom: 42 };
    const root = frame(width, height, label);
    const y = verticalAxis(root, margin, width, height, low, high, format);
    const { x, marks } = over === SPARSITY ? horizontal(margin, width) : plainAxis(over, margin, width);
    const at = (i) => x(over.values[i]);
    const shown = networks.map((_, i) => i).filter((i) => over.values[i] !== null && series.some((line) => i < line.values.length));
    for (const s of marks) {
      root.append(
        svg("line", { class: "axis", x1: x(s), x2: x(s), y1: height - margin.bottom, y2: height - margin.bottom + 5 }),
        svg("text", { x: x(s), y: height - margin.bottom + 19, "text-anchor": "middle" }, (over.format ?? axisPercent)(s)),
      );
    }
    root.append(baseline(margin, width, height));
    const name = over === SPARSITY && axis === "log" ? "sparsity (logarithmic in kept weights)" : over.name;
    root.append(svg("text", { x: (margin.left + width - margin.right) / 2, y: height - 4, "text-anchor": "middle" }, name));
    for (const reference of references) {
      root.append(
        svg("line", { class: "reference", x1: margin.left, x2: width - margin.right, y1: y(reference.value), y2: y(reference.value) }),
        // Where the curve is far: the densest network is at the right of all but sparsity.
        svg("text", { class: "value", y: y(reference.value) - 6, ...(over === SPARSITY ? { x: width - margin.right, "text-anchor": "end" } : { x: margin.left + 4 }) }, reference.name),
      );
    }
    const small = T > 30 ? 0.6 : 1;
    series.forEach((line) => {
      const points = shown.filter((i) => line.values[i] !== null).map((i) => [at(i), y(line.values[i]), i]);
      if (points.length > 1 && !over.scattered) root.append(svg("path", { class: `line s${line.style}`, d: `M${points.map(([px, py]) => `${px.toFixed(1)} ${py.toFixed(1)}`).join("L")}` }));
      for (const [px, py, i] of points) {
        const [value, error, kind] = [line.values[i], bar(line, i), line.marks?.[i] ?? line.style - 1];
        if (error) {
          const [top, foot] = [y(value + error).toFixed(1), y(value - error).toFixed(1)];
          const [left, right] = [(px - 4).toFixed(1), (px + 4).toFixed(1)];
          root.append(svg("path", { class: "error", d: `M${left} ${top}H${right}M${left} ${foot}H${right}M${px.toFixed(1)} ${top}V${foot}` }));
        }
        if (T <= 60 || kind === DIAMOND) {
          const mark = MARKS[kind](0, 0);
          mark.setAttribute("class", line.marks && kind === OPEN ? "mark open" : `mark f${line.style}`);
          mark.setAttribute("transform", `translate(${px.toFixed(1)} ${py.toFixed(1)}) scale(${small})`);
          root.append(mark);
        }
        // Beside the line, where it leaves room; the dense network has a line with its name.
        const falls = (points.at(-1)[1] - points[0][1]) * (points.at(-1)[0] - points[0][0]) > 0;
        const [dx, dy, anchor] = !falls ? [8, 16, "start"] : over === SPARSITY ? [-8, 16, "end"] : [8, -9, "start"];
        if (series.length < 2 && T <= 12 && i < T) root.append(svg("text", { x: px + dx, y: py + dy, "text-anchor": anchor }, String(i + 1)));
      }
    });
    const marker = svg("g", {});
    root.append(marker);
    const items = shown.map((i) => ({
      x: at(i),
      y: y(series.map((line) => line.values[i]).find((v) => v !== null) ?? low),
      marks: () => [
        svg("line", { class: "cross", x1: at(i), x2: at(i), y1: margin.top, y2: height - margin.bottom }),
        ...series.filter((line) => line.values[i] !== null).map((line) => svg("circle", { class: "halo", cx: at(i), cy: y(line.values[i]), r: line.marks ? 9 : 6.5 })),
      ],
      lines: () => [
        i < T ? levelName(i + 1) : "Dense network",
        i < T ? `sparsity ${percent(sparsities[i])}, ${count(levels[i].kept)} kept` : `${count(file.weights)} weights`,
        ...(over === SPARSITY ? [] : [`${over.name}: ${over.show(over.values[i])}`]),
        ...series.map((line) => `${line.name}: ${line.values[i] === null ? "–" : line.show(line.values[i], line.errors?.[i] ?? null)}`),
        ...(series[0].marks?.[i] === DIAMOND ? ["no other beats it"] : []),
      ],
    })).sort((a, b) => a.x - b.x);
    explore(root, items, marker);
    const sample = (...drawing) => svg("svg", { viewBox: "0 0 30 12", "aria-hidden": "true" }, ...drawing);
    const mark = (kind, style) => fill(MARKS[kind](15, 6), { class: `mark ${style}` }, []);
    const keys = series.length < 2 ? [] : series.map((line) =>
      make("li", {}, sample(svg("path", { class: `line s${line.style}`, d: "M0 6H30" }), mark(line.style - 1, `f${line.style}`)), line.name));
    if (series[0].marks?.includes(DIAMOND)) {
      keys.push(make("li", {}, sample(mark(DIAMOND, "f1")), "no other beats it"));
      if (series[0].marks.includes(OPEN) && T <= 60) keys.push(make("li", {}, sample(mark(OPEN, "open")), "another beats it"));
    }
    if (series[0].errors?.some((error) => error)) keys.push(make("li", {}, sample(svg("path", { class: "error", d: "M11 -1H19M11 13H19M15 -1V13" })), "standard error"));
    const legend = keys.length ? make("ul", { class: "legend" }, ...keys) : null;
    box.replaceChildren(...[root, legend].filter(Boolean));
  }

  // Beating is being at least as good in both, and better in one; null is unknown and beats nothing.
  const unbeaten = (found) => found.map((mine) => mine !== null && !found.some((theirs) =>
    theirs !== null && theirs[0] >= mine[0] && theirs[1] >= mine[1] && (theirs[0] > mine[0] || theirs[1] > mine[1])));

  // "Levels 3, 4 and the dense network", by positions in `networks`.
  function called(chosen) {
    const names = chosen.map((i) => (i < T ? String(i + 1) : "the dense network"));
    if (names.length > 13) names.splice(0, chosen.filter((i) => i < T).length, `${count(chosen.filter((i) => i < T).length)} levels`);
    else if (chosen[0] < T) names[0] = `${chosen[1] < T ? "levels" : "level"} ${names[0]}`;
    return names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : names[0];
  }

  function verdict(name, better, values, errors, marked) {
    if (!better) return [`The file does not say whether higher or lower ${name} is better, so no level is marked.`];
    const sentences = marked.length ? [`No other network beats ${called(marked)}: none is at least as good in both, and better in one.`] : [];
    const sign = better === "higher" ? 1 : -1;
    const known = values.map((_, i) => i).filter((i) => values[i] !== null);
    const best = known.reduce((a, b) => (sign * values[b] > sign * values[a] ? b : a));
    const equal = known.filter((i) => Math.abs(values[i] - values[best]) <= Math.hypot(errors[i] ?? 0, errors[best] ?? 0));
    if (equal.length > 1) {
      const text = called(equal);
      const why = equal.some((i) => errors[i]) ? " within their errors" : "";
      sentences.push(`${text[0].toUpperCase()}${text.slice(1)} are equal${why}, and have the best ${name}.`);
    }
    return sentences;
  }

  function drawTradeOff() {
    const chosen = $("metric").value;
    if (metrics.length) {
      const name = short(chosen, 60);
      const over = overs[Number($("over").value)];
      $("metric-caption").replaceChildren(make("bdi", {}, name), ` over ${over.name}`);
      const values = networks.map((entry) => own(entry.metrics, chosen));
      const errors = networks.map((entry) => own(entry.errors, chosen));
      const better = own(data.better, chosen);
      const sign = better === "higher" ? 1 : -1;
      const best = unbeaten(values.map((value, i) => (value === null || over.values[i] === null ? null : [sign * value, over.sign * over.values[i]])));
      const marks = better ? best.map((is) => (is ? DIAMOND : OPEN)) : null;
      // Over sparsity the dense network is a line, as it has none.
      const [dense, shown] = [values[T], over === SPARSITY ? T : T + 1];
      const series = [{ name, style: 1, values: values.slice(0, shown), errors, marks, show: measure }];
      chart("metric-chart", (box, width) => lineChart(box, width, {
        series,
        over,
        references: dense === null ? [] : [{ name: `dense ${measure(dense, errors[T])}`, value: dense }],
        format: number,
        fromZero: false,
        label: `${name} of every level over its ${over.name}; the tables have the numbers. Arrow keys move along the levels.`,
      }));
      $("metric-verdict").textContent = verdict(name, better, values, errors, networks.map((_, i) => i).filter((i) => best[i])).join(" ");
    } else {
      $("metric-figure").replaceChildren(make("figcaption", {}, "Metrics"), make("p", { class: "note" }, "The file records no metrics, such as the accuracy of each level. A trainer can store them in the profile."));
    }
    const series = LAYOUTS.map((name, i) => ({ name: `as ${name}`, style: i + 1, values: levels.map((level) => level.sizes[i]), show: size }));
    chart("size-chart", (box, width) => lineChart(box, width, {
      series,
      references: [{ name: `this file, all levels: ${size(file.size)}`, value: file.size }],
      format: axisSize,
      fromZero: true,
      label: "Size of every level as a file of its own, dense, as bitmask and as CSR, over its sparsity; the table of levels has the numbers. Arrow keys move along the levels.",
    }));
  }

  // ---------------------------------------------------------------- freeze steps

  // Kept counts are cumulative; their differences are what froze at each step, dense only last.
  function froze(kept, weights) {
    const steps = kept.map((n, i) => n - (i ? kept[i - 1] : 0));
    return [...steps, weights - (kept.length ? kept[kept.length - 1] : 0)];
  }

  function freezeChart(box, width, kept, weights) {
    const withDense = $("with-dense").checked;
    const amounts = froze(kept, weights).slice(0, withDense ? T + 1 : T);
    const bars = amounts.length;
    const labelled = T <= 12 && width / bars > 52;
    const height = 250;
    const most = Math.max(...amounts, 1);
    const format = axisCount;
    const margin = { left: room(ticks(0, most, 5).map(format)), right: 4, top: labelled ? 22 : 12, bottom: labelled ? 40 : 42 };
    const root = frame(width, height, "Number of weights that froze at each step. Arrow keys move along the steps.");
    const y = verticalAxis(root, margin, width, height, 0, most * 1.02, format);
    // The dense-only bar stands a little apart: it is no step.
    const inner = width - margin.left - margin.right;
    const gap = withDense ? Math.min(24, inner * 0.05) : 0;
    const slot = (inner - gap) / bars;
    const thin = Math.max(slot - Math.max(Math.min(slot * 0.22, 16), slot > 4 ? 1 : 0), 1);
    const items = amounts.map((amount, i) => {
      const t = i < T ? i + 1 : 0;
      const bar = Math.min(t ? thin : Math.max(thin, 6), 72);
      const x = margin.left + slot * (i + 0.5) + (t ? 0 : gap);
      const top = y(amount);
      const rect = svg("rect", { x: x - bar / 2, y: top, width: bar, height: Math.max(height - margin.bottom - top, 0), fill: stepColour(t), rx: bar > 8 ? 2 : 0 });
      root.append(rect);
      if (labelled) {
        root.append(
          svg("text", { class: "value", x, y: top - 7, "text-anchor": "middle" }, percent(share(amount, weights))),
          svg("text", { x, y: height - margin.bottom + 18, "text-anchor": "middle" }, t ? String(t) : "dense only"),
        );
      }
      return {
        x,
        y: top,
        marks: () => [svg("rect", { class: "halo", x: x - bar / 2 - 1, y: top - 1, width: bar + 2, height: Math.max(height - margin.bottom - top, 0) + 1 })],
        lines: () => [
          t ? `Freeze step ${t}` : "Dense only",
          ...(t ? [`first kept by ${levelName(t)}`] : []),
          `${count(amount)} weights, ${percent(share(amount, weights))}`,
        ],
      };
    });
    if (!labelled) {
      const every = Math.max(1, Math.ceil(T / Math.max(Math.floor(inner / 44), 1)));
      const step = [1, 2, 5, 10, 20, 25, 50, 100].find((s) => s >= every) || every;
      for (let t = step; t <= T; t += step) {
        root.append(svg("text", { x: margin.left + slot * (t - 0.5), y: height - margin.bottom + 18, "text-anchor": "middle" }, String(t)));
      }
      if (withDense) root.append(svg("text", { x: width - margin.right, y: height - 4, "text-anchor": "end" }, "dense only"));
    }
    root.append(baseline(margin, width, height));
    root.append(svg("text", { x: margin.left + (slot * T) / 2, y: height - 4, "text-anchor": "middle" }, "freeze step"));
    const marker = svg("g", {});
    root.append(marker);
    explore(root, items, marker);
    box.replaceChildren(root);
  }

  // ---------------------------------------------------------------- data of --full

  // Pictures and histograms are deflated, then base64; the browser inflates them when needed.
  const inflated = new Map();
  function inflate(text) {
    if (!inflated.has(text)) {
      const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
      inflated.set(text, new Response(stream).arrayBuffer());
    }
    return inflated.get(text);
  }
  const canInflate = typeof DecompressionStream === "function";

  function magnitudeChart(box, width, counts) {
    const { first, bins, per_octave: perOctave } = full.magnitudes;
    const height = 250;
    const at = (t, bin) => counts[t * bins + bin];
    const totals = Array.from({ length: bins }, (_, bin) => { let sum = 0; for (let t = 0; t <= T; t += 1) sum += at(t, bin); return sum; });
    // One long tail of tiny weights must not squeeze the rest: cut where nearly nothing is.
    const all = totals.reduce((a, b) => a + b, 0);
    let [from, to] = [0, bins];
    for (let sum = 0; from < to - 1 && (sum += totals[from]) < all * 2e-4;) from += 1;
    for (let sum = 0; to - 1 > from && (sum += totals[to - 1]) < all * 1e-5;) to -= 1;
    const cut = totals.slice(0, from).reduce((a, b) => a + b, 0);
    const most = Math.max(...totals.slice(from, to), 1);
    const format = axisCount;
    const margin = { left: room(ticks(0, most, 5).map(format)), right: 8, top: 12, bottom: 42 };
    const root = frame(width, height, "Number of weights by magnitude, stacked by freeze step, dense only at the top. Arrow keys move along the magnitudes.");
    const y = verticalAxis(root, margin, width, height, 0, most * 1.02, format);
    const slot = (width - margin.left - margin.right) / (to - from);
    const x = (log2) => margin.left + (log2 * perOctave - first - from) * slot;
    // Up to 24 colours: more layers of a stack than that nobody tells apart.
    const groups = Math.min(T, 24);
    for (let bin = from; bin < to; bin += 1) {
      let below = 0;
      const left = margin.left + (bin - from) * slot;
      for (let g = 0; g <= groups; g += 1) {
        const [start, stop] = g < groups ? [Math.floor((g * T) / groups) + 1, Math.floor(((g + 1) * T) / groups)] : [0, 0];
        let sum = 0;
        for (let t = start; t <= stop; t += 1) sum += at(t, bin);
        if (sum) root.append(svg("rect", { x: left, y: y(below + sum), width: slot > 8 ? slot - 1 : slot + 0.3, height: y(below) - y(below + sum), fill: stepColour(Math.floor((start + stop) / 2)), "shape-rendering": "crispEdges" }));
        below += sum;
      }
    }
    root.append(baseline(margin, width, height));
    for (let power = -14; power <= 8; power += 1) {
      const px = x(power * Math.log2(10));
      if (px < margin.left - 1 || px > width - margin.right + 1) continue;
      const label = power >= -3 && power <= 3 ? String(Number((10 ** power).toPrecision(1))) : `1e${power}`;
      root.append(
        svg("line", { class: "axis", x1: px, x2: px, y1: height - margin.bottom, y2: height - margin.bottom + 5 }),
        svg("text", { x: px, y: height - margin.bottom + 19, "text-anchor": "middle" }, label),
      );
    }
    root.append(svg("text", { x: (margin.left + width - margin.right) / 2, y: height - 4, "text-anchor": "middle" },
      cut ? `magnitude (${compact(cut)} smaller ${cut > 1 ? "weights" : "weight"} not shown)` : "magnitude"));
    const marker = svg("g", {});
    root.append(marker);
    const edge = (bin) => number(Number((2 ** ((first + bin) / perOctave)).toPrecision(3)));
    explore(root, totals.slice(from, to).map((total, i) => {
      const bin = from + i;
      const left = margin.left + i * slot;
      return {
        x: left + slot / 2,
        y: y(total),
        marks: () => [svg("rect", { class: "halo", x: left - 1, y: y(total) - 1, width: slot + 1, height: y(0) - y(total) + 1 })],
        lines: () => {
          const steps = Array.from({ length: T + 1 }, (_, k) => (k < T ? k + 1 : 0)).filter((t) => at(t, bin));
          const shown = steps.length > 7 ? [] : steps.map((t) => `${stepName(t)}: ${count(at(t, bin))}`);
          if (steps.length > 7) {
            let frozen = 0;
            for (const t of steps) if (t) frozen += at(t, bin);
            shown.push(`frozen: ${count(frozen)}`, `dense only: ${count(at(0, bin))}`);
          }
          return [`${edge(bin)} to ${edge(bin + 1)}`, `${count(total)} weights`, ...shown];
        },
      };
    }), marker);
    box.replaceChildren(root);
  }

  function stepKeys() {
    const box = (t) => { const swatch = make("span", { class: "swatch" }); swatch.style.background = stepColour(t); return swatch; };
    if (T <= 12) return make("ul", { class: "keys" }, ...[...Array(T).keys(), -1].map((i) => make("li", {}, box(i + 1), i < 0 ? "dense only" : isolated(`${i + 1} · ${levels[i].name}`, 40))));
    const ramp = make("span", { class: "ramp", "aria-hidden": "true" });
    ramp.style.background = `linear-gradient(to right, ${RAMPS[theme].steps.join(", ")})`;
    return make("ul", { class: "keys" }, make("li", {}, "step 1", ramp, `step ${T}`), make("li", {}, box(0), "dense only"));
  }

  async function drawMagnitudes() {
    if (!full || !canInflate || !layers.length) return;
    $("magnitude-figure").hidden = false;
    const counts = new Float64Array(await inflate(full.magnitudes.network));
    $("magnitude-figure").querySelector(".keys")?.remove();
    $("magnitude-figure").append(stepKeys());
    chart("magnitude-chart", (box, width) => magnitudeChart(box, width, counts));
  }

  // ---------------------------------------------------------------- layers

  const cells = T <= MOST_CELLS;
  const state = { sort: "order", falling: false, level: T, chosen: 0, limit: MOST_ROWS };
  const rows = [];
  const collator = new Intl.Collator("en", { numeric: true });
  let visible = [];

  const fraction = (layer, t) => share(layer.kept[t - 1], layer.weights);

  function layerRow(i) {
    if (rows[i]) return rows[i];
    const layer = layers[i];
    const pick = make("button", { type: "button", class: "pick", tabindex: -1, "aria-pressed": "false" }, isolated(layer.name, 300));
    const sub = make("span", { class: "sub" }, shape(layer.shape), make("span", { class: "weights-too" }, ` · ${compact(layer.weights)}`));
    const row = make("tr", {}, make("th", { scope: "row" }, pick, sub), make("td", { class: "shape" }, `${shape(layer.shape)}`, make("span", { class: "dtype" }, ` ${layer.dtype}`)), make("td", { class: "num weights" }, count(layer.weights)));
    row.dataset.layer = i;
    if (cells) for (let t = 1; t <= T; t += 1) row.append(make("td", { class: "heat" }, `${whole(fraction(layer, t))} %`));
    else row.append(make("td", { class: "num at-level" }), make("td", { class: "strip-cell" }, make("div", { class: "strip", role: "img" })));
    rows[i] = row;
    colourRow(i);
    return row;
  }

  function stripColour(share_) {
    const stops = [];
    for (let t = 1; t <= T; t += 1) {
      const colour = css(heatRgb(share_(t)));
      stops.push(`${colour} ${(((t - 1) / T) * 100).toFixed(3)}% ${((t / T) * 100).toFixed(3)}%`);
    }
    return `linear-gradient(to right, ${stops.join(", ")})`;
  }

  function colourRow(i) {
    const row = rows[i];
    const layer = layers[i];
    if (cells) {
      row.querySelectorAll(".heat").forEach((cell, k) => {
        const colour = heatRgb(fraction(layer, k + 1));
        cell.style.background = css(colour);
        cell.style.color = inkOn(colour);
      });
    } else {
      const strip = row.querySelector(".strip");
      strip.style.background = stripColour((t) => fraction(layer, t));
      strip.setAttribute("aria-label", `kept from ${percent(fraction(layer, 1))} at level 1 to ${percent(fraction(layer, T))} at level ${T}`);
      row.querySelector(".at-level").textContent = percent(fraction(layer, state.level));
    }
  }

  function sortButton(key, text, attributes, sub) {
    const button = make("button", { type: "button", class: "sort" }, text);
    button.addEventListener("click", () => sortBy(key));
    const cell = make("th", { scope: "col", "aria-sort": "none", ...attributes }, button, sub || null);
    cell.dataset.key = key;
    return cell;
  }

  function drawLayerHead() {
    const table = $("layer-table");
    const total = (t) => share(levels[t - 1].kept, file.weights);
    const head = make("tr", {}, sortButton("name", "Layer", {}), make("th", { scope: "col", class: "shape" }, "Shape"), sortButton("weights", "Weights", { class: "num weights" }));
    const foot = make("tr", {}, make("th", { scope: "row" }, "All layers"), make("td", { class: "shape" }), make("td", { class: "num weights" }, count(file.weights)));
    if (cells) {
      for (let t = 1; t <= T; t += 1) {
        head.append(sortButton(String(t), make("span", {}, make("span", { class: "word" }, "Level "), String(t)), { class: "level" }, make("span", { class: "sub" }, isolated(levels[t - 1].name, 24))));
        foot.append(make("td", { class: "group" }, `${whole(total(t))} %`));
      }
    } else {
      const ruler = make("div", { class: "ruler", "aria-hidden": "true" }, make("i", {}));
      const step = [5, 10, 20, 25, 50, 100].find((s) => T / s <= 6);
      for (const t of [1, ...Array.from({ length: Math.floor(T / step) }, (_, k) => (k + 1) * step)]) {
        const label = make("span", {}, String(t));
        if (t > 1 && t + step <= T) label.className = "inner";
        label.style.left = `${((t - 0.5) / T) * 100}%`;
        ruler.append(label);
      }
      head.append(sortButton("level", "Kept", { class: "num" }), make("th", { scope: "col", class: "strip-cell" }, make("span", { class: "hidden" }, "Kept at every level"), ruler));
      foot.append(make("td", { class: "num at-level" }), make("td", { class: "strip-cell" }, make("div", { class: "strip", "aria-hidden": "true" })));
    }
    table.replaceChildren(make("thead", {}, head), make("tbody", {}), make("tfoot", {}, foot));
  }

  function markLevel() {
    if (cells) return;
    const table = $("layer-table");
    const bar = table.querySelector(".ruler i");
    bar.style.left = `${((state.level - 1) / T) * 100}%`;
    bar.style.width = `${100 / T}%`;
    table.querySelector('[data-key="level"] .sort').replaceChildren(make("span", {}, "Kept ", make("span", { class: "word" }, "at level "), String(state.level)));
    table.querySelector("tfoot .at-level").textContent = percent(share(levels[state.level - 1].kept, file.weights));
    table.querySelector("tfoot .strip").style.background = stripColour((t) => share(levels[t - 1].kept, file.weights));
    $("level").value = String(state.level);
  }

  function setLevel(t) {
    state.level = t;
    rows.forEach((row, i) => { if (row) row.querySelector(".at-level").textContent = percent(fraction(layers[i], t)); });
    markLevel();
    if (state.sort === "level") listLayers();
  }

  // First press: names rise, numbers fall; second: reversed; third: the order of the file.
  function sortBy(key) {
    const start = key !== "name";
    if (state.sort !== key) Object.assign(state, { sort: key, falling: start });
    else if (state.falling === start) state.falling = !start;
    else Object.assign(state, { sort: "order", falling: false });
    listLayers();
    const order = state.sort === "order" ? "in the order of the file" : `sorted, ${state.falling ? "falling" : "rising"}`;
    say([`Layers ${order}`]);
  }

  function listLayers() {
    const wanted = $("filter").value.trim().toLowerCase();
    const compare = {
      order: (a, b) => a - b,
      name: (a, b) => collator.compare(layers[a].name, layers[b].name),
      weights: (a, b) => layers[a].weights - layers[b].weights,
    };
    const t = state.sort === "level" ? state.level : Number(state.sort);
    const by = compare[state.sort] || ((a, b) => fraction(layers[a], t) - fraction(layers[b], t));
    const sign = state.falling ? -1 : 1;
    visible = layers.map((_, i) => i).filter((i) => layers[i].name.toLowerCase().includes(wanted)).sort((a, b) => sign * by(a, b) || a - b);
    const drawn = visible.slice(0, state.limit);
    const body = $("layer-table").tBodies[0];
    const focused = body.contains(document.activeElement) ? document.activeElement : null;
    body.replaceChildren(...drawn.map(layerRow));
    if (focused && body.contains(focused)) focused.focus(); // moving an element takes the focus off it
    $("shown").textContent = visible.length === layers.length ? `${count(layers.length)} layers` : `${count(visible.length)} of ${count(layers.length)} layers`;
    const rest = visible.length - drawn.length;
    $("more-layers").hidden = rest === 0;
    $("more-layers").textContent = `Show ${count(rest)} more layers`;
    $("layer-table").querySelectorAll("[data-key]").forEach((cell) => {
      cell.setAttribute("aria-sort", cell.dataset.key !== state.sort ? "none" : state.falling ? "descending" : "ascending");
    });
    // One stop for the Tab key: the chosen layer, or the first that is shown.
    const stop = drawn.includes(state.chosen) ? state.chosen : drawn[0];
    drawn.forEach((i) => { rows[i].querySelector(".pick").tabIndex = i === stop ? 0 : -1; });
  }

  function drawHeatLegend() {
    const ramp = make("i", {});
    ramp.style.background = `linear-gradient(to right, ${RAMPS[theme].heat.join(", ")})`;
    $("heat-legend").replaceChildren("kept 0 %", ramp, percent(mostKept));
  }

  function followLayers() {
    const table = $("layer-table");
    const at = (event) => event.target.closest("tbody tr");
    const levelAt = (event) => {
      const strip = event.target.closest("tbody .strip");
      if (strip) {
        const box = strip.getBoundingClientRect();
        return Math.min(Math.max(Math.floor(((event.clientX - box.left) / box.width) * T) + 1, 1), T);
      }
      const cell = event.target.closest("tbody .heat");
      return cell ? cell.cellIndex - 2 : 0;
    };
    table.addEventListener("click", (event) => {
      const row = at(event);
      if (!row) return;
      const t = levelAt(event);
      if (t && !cells) setLevel(t);
      choose(Number(row.dataset.layer));
      row.querySelector(".pick").focus({ preventScroll: true });
    });
    table.addEventListener("pointermove", (event) => {
      const t = levelAt(event);
      if (!t) { hideTip(); return; }
      const layer = layers[Number(at(event).dataset.layer)];
      showTip([short(layer.name, 80), levelName(t), `keeps ${count(layer.kept[t - 1])} of ${count(layer.weights)}, ${percent(fraction(layer, t))}`], event.clientX, event.clientY);
    });
    table.addEventListener("pointerleave", hideTip);
    table.addEventListener("keydown", (event) => {
      const row = at(event);
      if (!row) return;
      if (!cells && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
        event.preventDefault();
        setLevel(Math.min(Math.max(state.level + (event.key === "ArrowLeft" ? -1 : 1), 1), T));
        say([levelName(state.level), `keeps ${percent(fraction(layers[Number(row.dataset.layer)], state.level))}`]);
        return;
      }
      const shown = [...table.tBodies[0].rows];
      const here = shown.indexOf(row);
      const moves = { ArrowDown: here + 1, ArrowUp: here - 1, PageDown: here + 10, PageUp: here - 10, Home: 0, End: shown.length - 1 };
      if (!(event.key in moves)) return;
      event.preventDefault();
      const next = shown[Math.min(Math.max(moves[event.key], 0), shown.length - 1)];
      row.querySelector(".pick").tabIndex = -1;
      const pick = next.querySelector(".pick");
      pick.tabIndex = 0;
      pick.focus({ preventScroll: true });
      reveal(next);
    });
  }

  // Scrolls only the table, past its sticky header and footer.
  function reveal(row) {
    const box = $("layer-scroll");
    const table = $("layer-table");
    const [top, bottom] = [row.offsetTop - table.tHead.offsetHeight, row.offsetTop + row.offsetHeight + table.tFoot.offsetHeight];
    if (box.scrollHeight > box.clientHeight) {
      if (top < box.scrollTop) box.scrollTop = top;
      else if (bottom > box.scrollTop + box.clientHeight) box.scrollTop = bottom - box.clientHeight;
    }
    row.scrollIntoView({ block: "nearest" });
  }

  // ---------------------------------------------------------------- one layer

  let picture = null; // the counters of the chosen layer's picture
  let shownLevel = T + 1; // T + 1 is the dense network: every colour

  function choose(i) {
    const before = rows[state.chosen];
    if (before) {
      before.classList.remove("chosen");
      before.querySelector(".pick").setAttribute("aria-pressed", "false");
      before.querySelector(".pick").tabIndex = -1;
    }
    state.chosen = i;
    const row = layerRow(i);
    row.classList.add("chosen");
    row.querySelector(".pick").setAttribute("aria-pressed", "true");
    row.querySelector(".pick").tabIndex = 0;
    drawLayer();
  }

  async function drawLayer() {
    const i = state.chosen;
    const layer = layers[i];
    if (!layer) return;
    $("layer-title").replaceChildren(make("span", { class: "of" }, "Layer "), isolated(layer.name, 200));
    const keeps = [1, T].slice(0, Math.min(T, 2)).map((t) => `level ${t} keeps ${percent(fraction(layer, t))}`).join(", ");
    $("layer-facts").textContent = `${shape(layer.shape)} · ${layer.dtype} · ${count(layer.weights)} weights: ${keeps}.`;
    chart("layer-freeze", (box, width) => freezeChart(box, width, layer.kept, layer.weights));
    const entry = full && full.pictures[i];
    $("layer-magnitude-figure").hidden = !(entry && canInflate);
    picture = null;
    if (!entry || !canInflate) {
      $("mask-caption").textContent = "Nested mask";
      $("mask-view").replaceChildren(make("p", { class: "note" }, ...whyNoPicture(layer)));
      return;
    }
    const [found, magnitudes] = await Promise.all([inflate(entry.cells), inflate(full.magnitudes.layers[i])]);
    if (state.chosen !== i) return; // another layer was chosen meanwhile
    picture = { ...entry, counters: new Uint8Array(found) };
    drawPictureControls(layer);
    const counts = new Float64Array(magnitudes);
    chart("layer-magnitude", (box, width) => magnitudeChart(box, width, counts));
  }

  function whyNoPicture(layer) {
    if (!full) return ["The picture of this layer’s mask needs the data, not only the header: make the report with ", make("code", {}, "elsa-inspect … --html report.html --full"), "."];
    if (!canInflate) return ["This browser is too old to unpack the pictures (it lacks DecompressionStream)."];
    if (!layer.weights) return ["The tensor is empty."];
    const held = Object.keys(full.pictures).length;
    return [`To keep this page small it holds pictures of the ${count(held)} largest of ${count(layers.length)} layers, and this is not one of them.`];
  }

  function drawPictureControls(layer) {
    const { rows: height, cols: width, split } = picture;
    const canvas = make("canvas", { id: "mask", width: picture.width, height: picture.height, role: "img" });
    // The matrix's own proportions, within reason: a bias is a stripe, not a hair.
    const ratio = Math.min(Math.max(height / width, 0.12), 1);
    canvas.style.aspectRatio = `1 / ${ratio}`;
    const slider = make("input", { type: "range", id: "mask-level", min: 1, max: T + 1, step: 1, "aria-describedby": "mask-said" });
    slider.value = String(shownLevel);
    const said = make("output", { id: "mask-said", for: "mask-level" });
    slider.addEventListener("input", () => { shownLevel = Number(slider.value); paint(); });
    const across = (dims) => (dims.length > 1 ? ` (${dims.join(" × ")})` : "");
    const exact = picture.width === width && picture.height === height;
    const block = `${Number((height / picture.height).toFixed(1))} × ${Number((width / picture.width).toFixed(1))}`;
    $("mask-caption").textContent = exact ? "Nested mask, one cell for each weight" : `Nested mask, one cell for ${block} weights`;
    $("mask-view").replaceChildren(
      make("div", { class: "slider" }, make("label", { for: "mask-level" }, "Show level"), slider, said),
      canvas,
      stepKeys(),
      make("p", { class: "mask-axis" },
        `${count(height)} rows${across(layer.shape.slice(0, split))}, ${count(width)} columns${across(layer.shape.slice(split))}.`
        + (exact ? "" : " Each cell shows one weight drawn at random from its block, so every colour has its true share.")),
    );
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const col = Math.min(Math.max(Math.floor(((event.clientX - box.left) / box.width) * picture.width), 0), picture.width - 1);
      const row = Math.min(Math.max(Math.floor(((event.clientY - box.top) / box.height) * picture.height), 0), picture.height - 1);
      const t = picture.counters[row * picture.width + col];
      const span = (at, all, shown) => {
        const [from, to] = [Math.floor((at * all) / shown), Math.floor(((at + 1) * all) / shown) - 1];
        return from < to ? `${count(from)} to ${count(to)}` : count(from);
      };
      showTip([
        t ? `Freeze step ${t}` : "Dense only",
        ...(t ? [`kept from ${levelName(t)} on`] : []),
        `row ${span(row, height, picture.height)}, column ${span(col, width, picture.width)}`,
      ], event.clientX, event.clientY);
    });
    canvas.addEventListener("pointerleave", hideTip);
    paint();
  }

  function paint() {
    const canvas = $("mask");
    if (!canvas || !picture) return;
    const layer = layers[state.chosen];
    const context = canvas.getContext("2d");
    const image = context.createImageData(picture.width, picture.height);
    const absent = parts(RAMPS[theme].absent);
    const palette = Array.from({ length: T + 1 }, (_, t) => (shownLevel > T || (t && t <= shownLevel) ? stepRgb(t) : absent));
    const pixels = new Uint32Array(image.data.buffer);
    const little = new Uint8Array(new Uint32Array([1]).buffer)[0] === 1;
    const packed = palette.map(([r, g, b]) => (little ? (255 << 24) | (b << 16) | (g << 8) | r : (r << 24) | (g << 16) | (b << 8) | 255) >>> 0);
    for (let k = 0; k < pixels.length; k += 1) pixels[k] = packed[picture.counters[k]];
    context.putImageData(image, 0, 0);
    const text = shownLevel > T
      ? "Dense network: every weight, in the colour of its freeze step"
      : `${levelName(shownLevel)}: keeps ${count(layer.kept[shownLevel - 1])} weights, ${percent(fraction(layer, shownLevel))}`;
    $("mask-said").textContent = text;
    $("mask-level").setAttribute("aria-valuetext", text);
    canvas.setAttribute("aria-label", `Mask of ${short(layer.name, 80)}. ${text}`);
  }

  // ---------------------------------------------------------------- the rest

  function drawMore() {
    const section = (title, head, body) =>
      make("details", {}, make("summary", {}, title),
        make("div", { class: "scroll" }, make("table", { class: "plain" },
          make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text)))), make("tbody", {}, ...body))));
    const body = [];
    if (full) {
      const held = Object.keys(full.pictures).length;
      body.push(make("p", { class: "hint" }, held === layers.length
        ? `The page holds a picture of every nested tensor, of at most ${full.side} × ${full.side} cells.`
        : `The page holds pictures of the ${count(held)} largest of ${count(layers.length)} nested tensors, of at most ${full.side} × ${full.side} cells; the others were left out to keep it small.`));
    }
    if (data.others.length) {
      const kinds = (kind) => data.others.filter((other) => other[1] === kind).length;
      body.push(section(`Tensors without counters: ${count(kinds("per-level"))} per level, ${count(kinds("shared"))} shared by all levels`,
        ["Tensor", "Kind", "Dtype", "Shape"],
        data.others.slice(0, 5000).map(([name, kind, dtype, dims]) => make("tr", {}, make("td", {}, isolated(name, 300)), make("td", {}, kind), make("td", {}, dtype), make("td", {}, shape(dims))))));
    }
    if (data.metadata.length) {
      body.push(section(`Other metadata: ${count(data.metadata.length)} ${data.metadata.length > 1 ? "entries" : "entry"}`, ["Key", "Value"],
        data.metadata.map(([key, text, length]) => make("tr", {}, make("td", {}, isolated(key, 100)),
          make("td", { class: "pre" }, isolated(text, 1000), length > text.length ? ` (${count(length)} characters in all)` : "")))));
    }
    if (!body.length) body.push(make("p", { class: "hint" }, "Every tensor carries counters, and there is no other metadata."));
    $("more-body").replaceChildren(...body);
    $("foot").textContent = "Made by elsa-inspect from the file alone. Level t keeps the weights whose counter, the least significant bits, is 1 to t; counter 0 belongs to the dense network only.";
  }

  // ---------------------------------------------------------------- theme

  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  // A page opened from disk may not be allowed to remember anything.
  function remembered() { try { return localStorage.getItem("elsa-report-theme"); } catch { return null; } }
  function remember(value) { try { localStorage.setItem("elsa-report-theme", value); } catch { /* so be it */ } }
  let wish = ["light", "dark"].includes(remembered()) ? remembered() : null;

  function setTheme(next) {
    theme = next;
    document.documentElement.dataset.theme = next;
    $("theme").textContent = next === "dark" ? "Light theme" : "Dark theme";
  }
  const ownTheme = () => wish || (prefersDark.matches ? "dark" : "light");
  function applyTheme(next) {
    if (next === theme) return;
    setTheme(next);
    hideTip();
    drawLevels();
    drawHeatLegend();
    rows.forEach((row, i) => { if (row) colourRow(i); });
    if (layers.length) markLevel();
    document.querySelectorAll(".keys").forEach((keys) => keys.replaceWith(stepKeys()));
    charts.forEach((_, id) => drawChart(id));
    paint();
  }
  $("theme").addEventListener("click", () => {
    wish = theme === "dark" ? "light" : "dark";
    remember(wish);
    applyTheme(wish);
  });
  prefersDark.addEventListener("change", () => applyTheme(ownTheme()));
  addEventListener("beforeprint", () => applyTheme("light"));
  addEventListener("afterprint", () => applyTheme(ownTheme()));

  // ---------------------------------------------------------------- what was measured

  function drawMeasured() {
    if (!data.measured.length) return;
    const cell = (value, show) => make("td", { class: "num" }, value === null ? "–" : show(value));
    const time = (seconds) => `${Number((1000 * seconds).toPrecision(4))} ms`;
    const head = ["Level", "Best", "Model", "Download", "Memory", "Dense", "Fast"];
    $("measured-table").replaceChildren(
      make("thead", {}, make("tr", {}, ...head.map((text, i) => make("th", { scope: "col", class: i > 1 ? "num" : undefined }, text)))),
      make("tbody", {}, ...data.measured.map((row) => make("tr", {},
        make("th", { scope: "row" }, String(row.level)),
        make("td", {}, row.best ? "★" : ""),
        cell(row.size, size), cell(row.download, size), cell(row.memory, size),
        cell(row.dense_seconds, time), cell(row.fast_seconds, time)))),
    );
    const axes = Object.entries(data.measured[0].axes ?? {}).map(([axis, length]) => `${axis}=${length}`);
    if (axes.length) $("measured-axes").textContent = `Axes that the graph leaves open were measured as ${axes.join(", ")}.`;
    $("measured").hidden = false;
  }

  // ---------------------------------------------------------------- start

  setTheme(ownTheme());
  drawHead();
  drawLevels();
  drawMeasured();
  if (metrics.length) {
    $("metric").append(...metrics.map((metric) => make("option", { value: metric }, short(metric, 40))));
    const accuracy = metrics.find((metric) => /acc|top.?1/i.test(metric));
    if (accuracy) $("metric").value = accuracy;
    $("metric-control").hidden = metrics.length < 2;
    $("over").append(...overs.map((over, i) => make("option", { value: i }, over.name)));
    $("over-control").hidden = false;
    for (const id of ["metric", "over"]) {
      $(id).addEventListener("change", () => { drawTradeOff(); say([$("metric-verdict").textContent]); });
    }
  }
  document.querySelectorAll('input[name="axis"]').forEach((radio) => radio.addEventListener("change", () => { axis = radio.value; drawTradeOff(); }));
  drawTradeOff();
  chart("freeze-chart", (box, width) => freezeChart(box, width, levels.map((level) => level.kept), file.weights));
  $("with-dense").addEventListener("change", () => { drawChart("freeze-chart"); drawChart("layer-freeze"); });
  drawMagnitudes();
  if (layers.length) {
    drawHeatLegend();
    drawLayerHead();
    if (!cells) {
      $("level").append(...levels.map((level, i) => make("option", { value: i + 1 }, `${i + 1} · ${short(level.name, 30)}`)));
      $("level-control").hidden = false;
      $("level").addEventListener("change", () => setLevel(Number($("level").value)));
      markLevel();
    }
    listLayers();
    followLayers();
    let typing = 0;
    $("filter").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(listLayers, layers.length > 300 ? 120 : 0); });
    $("more-layers").addEventListener("click", () => { state.limit = Infinity; listLayers(); });
    // Start with the first layer that is worth a picture, else with the largest.
    const largest = layers.reduce((best, layer, i) => (layer.weights > layers[best].weights ? i : best), 0);
    const first = layers.findIndex((layer, i) => layer.weights >= 4096 && layer.shape.length > 1 && (!full || full.pictures[i]));
    choose(first < 0 ? largest : first);
    listLayers();
  } else {
    for (const id of ["layers", "layer", "freeze-steps"]) $(id).hidden = true;
  }
  drawMore();
  document.documentElement.dataset.ready = "true";
})();
