"use strict";
// Charts as SVG at the width of their box. Each mark has a tooltip for pointer, keyboard and screen readers.
const Charts = (() => {
  const NAMESPACE = "http://www.w3.org/2000/svg";
  const COLOURS = ["var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)"];
  const colour = (i) => COLOURS[i % COLOURS.length];
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.setAttribute("role", "status");
  document.body.append(tip);

  function element(name, attributes = {}, ...children) {
    const node = document.createElementNS(NAMESPACE, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  function withTip(node, lines) {
    const show = () => {
      tip.replaceChildren(...lines.map((line, i) => {
        const row = document.createElement(i ? "div" : "b");
        row.textContent = line;
        return row;
      }));
      tip.classList.add("shown");
      const at = node.getBoundingClientRect(), own = tip.getBoundingClientRect();
      const left = Math.min(Math.max(4, at.left + at.width / 2 - own.width / 2), innerWidth - own.width - 4);
      const above = at.top - own.height - 8;
      tip.style.left = `${left + scrollX}px`;
      tip.style.top = `${(above > 0 ? above : at.bottom + 8) + scrollY}px`;
    };
    const hide = () => tip.classList.remove("shown");
    node.setAttribute("tabindex", "0");
    node.setAttribute("role", "img");
    node.setAttribute("aria-label", lines.join(", "));
    node.classList.add("mark");
    for (const event of ["pointerenter", "focus"]) node.addEventListener(event, show);
    for (const event of ["pointerleave", "blur"]) node.addEventListener(event, hide);
    return node;
  }

  function ticks(low, high, most) {
    const step = (high - low) / most, power = 10 ** Math.floor(Math.log10(step));
    const unit = [1, 2, 2.5, 5, 10].find((u) => u * power >= step) * power;
    const found = [];
    for (let i = Math.ceil(low / unit - 1e-9); i * unit <= high + unit * 1e-9; i++) found.push(Number((i * unit).toPrecision(12)));
    return found;
  }

  // A plot area with a vertical axis. y: {low, high, label, format}
  function frame(box, height, y, left = 58, bottom = 40) {
    const width = Math.max(240, box.clientWidth);
    const inside = {left, right: width - 8, top: 12, bottom: height - bottom};
    const svg = element("svg", {viewBox: `0 0 ${width} ${height}`, width, height, role: "group"});
    const place = (value) => inside.bottom - (value - y.low) / (y.high - y.low) * (inside.bottom - inside.top);
    for (const value of ticks(y.low, y.high, 5)) {
      svg.append(element("line", {class: "grid", x1: inside.left, x2: inside.right, y1: place(value), y2: place(value)}));
      svg.append(element("text", {class: "tick", x: inside.left - 6, y: place(value) + 4, "text-anchor": "end"}, y.format(value)));
    }
    svg.append(element("text", {class: "axis", x: 4, y: 0, transform: `translate(11 ${inside.bottom}) rotate(-90)`}, y.label));
    box.replaceChildren(svg);
    return {svg, inside, place, width, height};
  }

  function below(at, label) {
    at.svg.append(element("text", {class: "axis", x: at.inside.right, y: at.height - 4, "text-anchor": "end"}, label));
  }

  function rule(at, value) {
    const y = at.place(value);
    at.svg.append(element("line", {class: "rule", x1: at.inside.left, x2: at.inside.right, y1: y, y2: y}));
  }

  function spread(at, x, low, high) {
    if (low === null || low === undefined) return;
    const [top, base] = [at.place(high), at.place(low)];
    at.svg.append(element("path", {class: "spread", d: `M${x - 4} ${top}h8M${x} ${top}V${base}M${x - 4} ${base}h8`}));
  }

  // series: [{name, points: [{x, y, low, high, lines}]}]; x: {label, whole: only at whole numbers}
  function lines(box, series, x, y) {
    const at = frame(box, 260, y), every = series.flatMap((s) => s.points.map((p) => p.x));
    const first = Math.min(...every), last = Math.max(...every), pad = x.whole ? 0.35 : 0;
    const across = (value) => at.inside.left + 8
      + (last + pad > first - pad ? (value - first + pad) / (last - first + 2 * pad) : 0.5) * (at.inside.right - at.inside.left - 16);
    const marks = x.whole ? [...new Set(every)].sort((a, b) => a - b) : ticks(first, last, Math.min(8, at.width / 90));
    for (const value of marks)
      at.svg.append(element("text", {class: "tick", x: across(value), y: at.inside.bottom + 16, "text-anchor": "middle"},
        value.toLocaleString("en")));
    series.forEach((s, i) => {
      const shift = x.whole ? 5 * (i - (series.length - 1) / 2) : 0;
      const path = s.points.map((p, k) => `${k ? "L" : "M"}${across(p.x) + shift} ${at.place(p.y)}`).join("");
      at.svg.append(element("path", {class: "line", d: path, stroke: colour(s.colour ?? i)}));
      for (const p of s.points) {
        spread(at, across(p.x) + shift, p.low, p.high);
        const mark = element("circle", {cx: across(p.x) + shift, cy: at.place(p.y), r: s.size ?? 4.5, fill: colour(s.colour ?? i)});
        at.svg.append(withTip(mark, p.lines));
      }
    });
    below(at, x.label);
  }

  // groups: names; series: [{name, values: [null | {y, low, high, lines}]}]
  function bars(box, groups, series, x, y, line) {
    const at = frame(box, 270, y), wide = (at.inside.right - at.inside.left) / groups.length;
    const bar = Math.min(46, wide * 0.8 / series.length);
    groups.forEach((name, g) => {
      const middle = at.inside.left + wide * (g + 0.5);
      const most = Math.max(3, Math.floor((wide - 8) / 7));
      const label = name.length > most ? `${name.slice(0, most - 1)}…` : name;
      at.svg.append(element("text", {class: "tick", x: middle, y: at.inside.bottom + 16, "text-anchor": "middle"}, label));
      series.forEach((s, i) => {
        const value = s.values[g];
        if (!value) return;
        const left = middle + (i - series.length / 2) * bar, top = at.place(value.y);
        const mark = element("rect", {x: left + 1, y: top, width: bar - 2, height: Math.max(0, at.place(y.low) - top),
          fill: colour(s.colour ?? i), rx: 1.5});
        at.svg.append(withTip(mark, value.lines));
        spread(at, left + bar / 2, value.low, value.high);
      });
    });
    rule(at, line);
    below(at, x.label);
  }

  // rows: [{name, parts: [{name, value, colour, lines}]}], all in one unit, starting at zero
  function stacks(box, rows, unit) {
    const width = Math.max(240, box.clientWidth), tall = 46, height = rows.length * tall + 34;
    const svg = element("svg", {viewBox: `0 0 ${width} ${height}`, width, height, role: "group"});
    const most = Math.max(...rows.map((row) => row.parts.reduce((sum, part) => sum + part.value, 0)));
    const across = (value) => 4 + value / most * (width - 12);
    for (const value of ticks(0, most, Math.min(6, width / 90))) {
      svg.append(element("line", {class: "grid", x1: across(value), x2: across(value), y1: 4, y2: height - 28}));
      svg.append(element("text", {class: "tick", x: across(value), y: height - 14, "text-anchor": "middle"}, String(value)));
    }
    rows.forEach((row, i) => {
      svg.append(element("text", {class: "tick", x: 4, y: i * tall + 14}, row.name));
      let from = 0;
      for (const part of row.parts) {
        const mark = element("rect", {x: across(from), y: i * tall + 19, width: Math.max(1, across(from + part.value) - across(from) - 1),
          height: 21, fill: part.colour, rx: 1.5});
        svg.append(withTip(mark, part.lines));
        from += part.value;
      }
    });
    svg.append(element("text", {class: "axis", x: width - 4, y: height - 1, "text-anchor": "end"}, unit));
    box.replaceChildren(svg);
  }

  // steps: [{name, value, lines, whole}]; a bar goes from the previous value to its value; if whole, from zero
  function waterfall(box, steps, y, line) {
    const at = frame(box, 290, y), wide = (at.inside.right - at.inside.left) / steps.length;
    steps.forEach((step, i) => {
      const before = step.whole ? 0 : steps[i - 1].value, [low, high] = [Math.min(before, step.value), Math.max(before, step.value)];
      const left = at.inside.left + wide * i + wide * 0.12, top = at.place(high);
      const fill = step.whole ? "var(--c0)" : step.value < before ? "var(--c3)" : "var(--c2)";
      const mark = element("rect", {x: left, y: top, width: wide * 0.76, height: Math.max(1.5, at.place(low) - top), fill, rx: 1.5});
      at.svg.append(withTip(mark, step.lines));
      at.svg.append(element("text", {class: "tick value", x: left + wide * 0.38, y: top - 5, "text-anchor": "middle"},
        wide < 56 ? step.value.toFixed(2) : y.format(step.value)));
      step.name.split(" ").forEach((word, k) => at.svg.append(element("text",
        {class: "tick", x: left + wide * 0.38, y: at.inside.bottom + 14 + 12 * (k + (wide < 48 ? i % 2 : 0)), "text-anchor": "middle"}, word)));
    });
    rule(at, line);
  }

  function legend(box, names) {
    box.replaceChildren(...names.map(({name, fill}) => {
      const entry = document.createElement("span"), square = document.createElement("i");
      if (fill) square.style.background = fill;
      else square.className = "dashed";
      entry.append(square, name);
      return entry;
    }));
  }

  return {colour, lines, bars, stacks, waterfall, legend, withTip};
})();
