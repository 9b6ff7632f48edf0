"use strict";
// The page of `lapilli inspect --html`: moving about in the graphs, searching them, and what is known of the selected box.
// Everything shown comes from attributes, as text.
for (const viewer of document.querySelectorAll(".viewer")) {
  const svg = viewer.querySelector("svg.graph");
  const facts = viewer.querySelector(".facts");
  const search = viewer.querySelector("input");
  const found = viewer.querySelector("output");
  const boxes = [...svg.querySelectorAll("g[tabindex]")];
  const whole = { w: Number(svg.dataset.width), h: Number(svg.dataset.height) };
  const view = { x: -10, y: -10, w: 1, h: 1 };
  let matches = [];
  let selected = null;

  const show = () => svg.setAttribute("viewBox", `${view.x} ${view.y} ${view.w} ${view.h}`);
  const shape = () => svg.clientHeight / Math.max(1, svg.clientWidth);

  function fit(all) {
    const wide = all ? Math.max(whole.w, whole.h / shape()) : Math.max(200, Math.min(svg.clientWidth, Math.max(whole.w, 600)));
    Object.assign(view, { x: -10 - Math.max(0, wide - whole.w) / 2, y: -10, w: wide, h: wide * shape() });
    show();
  }

  function zoom(factor, px = 0.5, py = 0.5) {
    const limit = 4 * Math.max(whole.w, whole.h / shape(), 400);
    const w = Math.min(limit, Math.max(60, view.w / factor));
    const h = w * shape();
    view.x += (view.w - w) * px;
    view.y += (view.h - h) * py;
    view.w = w;
    view.h = h;
    show();
  }

  function placeOf(box) {
    const place = box.transform.baseVal[0].matrix;
    return { x: place.e, y: place.f };
  }

  function into_view(box) {
    const { x, y } = placeOf(box);
    if (x < view.x || x + 150 > view.x + view.w) view.x = x + 75 - view.w / 2;
    if (y < view.y || y + 34 > view.y + view.h) view.y = y + 17 - view.h / 2;
    show();
  }

  function select(box, focus = true) {
    if (selected) {
      selected.classList.remove("selected");
      selected.tabIndex = -1;
    }
    boxes[0].tabIndex = -1;
    selected = box;
    box.classList.add("selected");
    box.tabIndex = 0;
    into_view(box);
    if (focus) box.focus({ preventScroll: true });
    facts.replaceChildren();
    for (const attribute of box.getAttributeNames()) {
      if (!attribute.startsWith("data-")) continue;
      const name = document.createElement("dt");
      const value = document.createElement("dd");
      name.textContent = attribute.slice(5).replaceAll("-", " ");
      value.textContent = box.getAttribute(attribute);
      facts.append(name, value);
    }
  }

  function look() {
    const wanted = search.value.trim().toLowerCase();
    const text = (box) => box.getAttributeNames().filter((a) => a.startsWith("data-")).map((a) => box.getAttribute(a)).join("\n");
    matches = wanted ? boxes.filter((box) => text(box).toLowerCase().includes(wanted)) : [];
    for (const box of boxes) box.classList.toggle("other", wanted !== "" && !matches.includes(box));
    found.textContent = wanted ? `${matches.length} found` : "";
    if (matches.length) into_view(matches[0]);
  }

  function step(list, by) {
    if (!list.length) return;
    const at = list.indexOf(selected);
    select(list[(at < 0 ? (by > 0 ? 0 : list.length - 1) : at + by + list.length) % list.length]);
  }

  const moves = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };
  svg.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const box = event.target.closest("g[tabindex]");
    const move = moves[event.key];
    if (move && event.shiftKey) {
      view.x += move[0] * view.w * 0.1;
      view.y += move[1] * view.h * 0.1;
      show();
    } else if (move) step(boxes, move[0] + move[1]);
    else if (event.key === "Home") select(boxes[0]);
    else if (event.key === "End") select(boxes[boxes.length - 1]);
    else if (event.key === "+" || event.key === "=") zoom(1.25);
    else if (event.key === "-") zoom(0.8);
    else if (event.key === "0") fit(true);
    else if (event.key === "n") step(matches, 1);
    else if (event.key === "/") search.focus();
    else if ((event.key === "Enter" || event.key === " ") && box) select(box);
    else return;
    event.preventDefault();
  });
  search.addEventListener("input", look);
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") step(matches, 1);
    else if (event.key === "Escape") {
      search.value = "";
      look();
    } else return;
    event.preventDefault();
  });
  for (const button of viewer.querySelectorAll("button")) {
    const does = { in: () => zoom(1.25), out: () => zoom(0.8), all: () => fit(true), near: () => fit(false) };
    button.addEventListener("click", does[button.dataset.does]);
  }
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && document.activeElement !== svg && !svg.contains(document.activeElement)) return; // the page scrolls
    event.preventDefault();
    const at = svg.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY / 400), (event.clientX - at.x) / at.width, (event.clientY - at.y) / at.height);
  }, { passive: false });

  let held = null;
  svg.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, y: event.clientY, box: event.target.closest("g[tabindex]"), moved: false };
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (!held) return;
    const scale = view.w / svg.clientWidth;
    const [dx, dy] = [event.clientX - held.x, event.clientY - held.y];
    if (!held.moved && Math.hypot(dx, dy) < 4) return;
    view.x -= dx * scale;
    view.y -= dy * scale;
    Object.assign(held, { x: event.clientX, y: event.clientY, moved: true });
    show();
  });
  const release = () => {
    if (held && !held.moved && held.box) select(held.box);
    held = null;
  };
  svg.addEventListener("pointerup", release);
  svg.addEventListener("pointercancel", () => (held = null));
  viewer.classList.add("live");
  new ResizeObserver(() => {
    view.h = view.w * shape();
    show();
  }).observe(svg);
  fit(false);
}
