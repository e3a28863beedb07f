"use strict";
const at = (id) => document.getElementById(id);

// Titles, ids and values come from data that nobody has checked: they only ever become text, or a picture's address.
function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const query = at("query"), suggestions = at("suggestions"), answers = document.querySelectorAll(".answer");
const history_ = [];
let found = [], selected = -1, searches = 0, requests = 0, timer = 0;
let served = {}, shadow = null, mostScore = null, largest = 0;
const HINT = "Add items to the history to see what the model retrieves after them.";
const POPULAR = `${HINT} These have the most actions:`;

const titleOf = (item) => item.title || item.id;

function pictureOf(item) {
  for (const [column, value] of Object.entries(item.columns || {})) {
    if (typeof value !== "string" || !/^https?:[/][/]/i.test(value) || !URL.canParse(value)) continue;
    const named = /image|img|picture|photo|poster|cover|thumb/i.test(column);
    if (!named && !/[.](avif|gif|jpe?g|png|svg|webp)$/i.test(new URL(value).pathname)) continue;
    const picture = element("img", { alt: "", loading: "lazy", decoding: "async", referrerPolicy: "no-referrer" });
    picture.addEventListener("error", () => picture.remove());
    picture.src = value;
    return picture;
  }
  return null;
}

// A place for each, if one of them has a picture.
function picturesOf(items) {
  const pictures = items.map(pictureOf), any = pictures.some(Boolean);
  return pictures.map((picture) => any ? [element("span", { className: "picture" }, picture || "")] : []);
}

function valuesOf(item) {
  const shown = Object.entries(item.columns || {}).filter(([, value]) => !/^https?:[/][/]/i.test(value));
  const parts = shown.map(([column, value]) => {
    const text = typeof value === "number" ? value.toLocaleString("en-US") : value;
    return element("span", {}, `${column} `, element("span", {}, text.length > 60 ? `${text.slice(0, 60)}…` : text));
  });
  return parts.length ? [element("span", { className: "values" }, ...parts)] : [];
}

function nameOf(item, name = titleOf(item), ...more) {
  const id = item.title ? [element("span", { className: "id" }, item.id)] : [];
  return element("span", { className: "name" }, name, ...id, ...more);
}

async function ask(path, options = {}, asked = false) {
  const token = sessionStorage.getItem("token");
  const response = await fetch(path, { ...options, headers: token ? { Authorization: `Bearer ${token}` } : {} });
  if (response.status === 401 && !asked) {
    const given = prompt("This server needs a token:");
    if (given) {
      sessionStorage.setItem("token", given.trim());
      return ask(path, options, true);
    }
  }
  const answer = await response.json().catch(() => ({ error: `status ${response.status}` }));
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function entries(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`The other entries are not JSON: ${error.message}`);
  }
}

async function search() {
  const turn = ++searches;
  let items = [], more = false, problem = "";
  try {
    ({ items, more } = await ask(`items?limit=20&query=${encodeURIComponent(query.value.trim())}`));
  } catch (error) {
    problem = error.message;
  }
  if (turn !== searches || document.activeElement !== query) return;
  found = items;
  selected = found.length && query.value.trim() ? 0 : -1;
  const pictures = picturesOf(found);
  const rows = found.map((item, place) => {
    const properties = { className: "item", role: "option", id: `item-${place}` };
    const row = element("li", properties, ...pictures[place], nameOf(item, titleOf(item), ...valuesOf(item)));
    row.addEventListener("mousedown", (event) => { event.preventDefault(); add(found[place]); });
    return row;
  });
  const note = problem || (!found.length ? "No such item." : more ? "There are more: type on." : "");
  if (note) rows.push(element("li", { className: "quiet" }, note));
  suggestions.replaceChildren(...rows);
  show(true);
  mark();
}

function show(open) {
  suggestions.hidden = !open;
  query.setAttribute("aria-expanded", String(open));
  if (!open) query.removeAttribute("aria-activedescendant");
}

function mark() {
  suggestions.querySelectorAll(".item").forEach((row, place) => {
    row.setAttribute("aria-selected", String(place === selected));
    if (place === selected) row.scrollIntoView({ block: "nearest" });
  });
  if (selected >= 0) query.setAttribute("aria-activedescendant", `item-${selected}`);
}

function add(item) {
  history_.push(item);
  query.value = "";
  ++searches;
  show(false);
  changed();
}

function changed() {
  const pictures = picturesOf(history_);
  at("history").replaceChildren(...history_.map((item, place) => {
    const remove = element("button", { className: "remove", title: "Remove", type: "button" }, "×");
    remove.setAttribute("aria-label", `Remove ${titleOf(item)}`);
    remove.addEventListener("click", () => {
      history_.splice(place, 1);
      changed();
      const left = at("history").querySelectorAll(".remove");
      (left[Math.min(place, left.length - 1)] || query).focus();
    });
    const number = element("span", { className: "number" }, String(place + 1));
    return element("li", {}, number, ...pictures[place], nameOf(item), remove);
  }));
  retrieve();
}

function request() {
  const others = entries(at("others").value.trim() || "{}");
  const body = { history: history_.map((item) => item.id), k: Number(at("k").value) };
  if (at("where").value.trim()) body.where = at("where").value.trim();
  return { ...body, ...others };
}

async function answerOf(path, body) {
  const start = performance.now();
  try {
    const told = { columns: true, explain: body.k <= 100, ...body };
    const answer = await ask(path, { method: "POST", body: JSON.stringify(told) });
    return { ...answer, milliseconds: performance.now() - start };
  } catch (error) {
    return { error: error.message };
  }
}

async function retrieve() {
  const turn = ++requests;
  let body, told;
  try {
    body = request();
    told = await Promise.all(["retrieve", ...(shadow ? ["shadow"] : [])].map((path) => answerOf(path, body)));
  } catch (error) {
    told = [{ error: error.message }];
  }
  if (turn !== requests) return;
  // Without a history, an export that does not say what is popular has no answer.
  const asked = body && (body.history.length || body.user || body.where);
  for (const answer of told) answer.hint = answer.fallback ? POPULAR : body && !asked && answer.error ? HINT : "";
  for (const row of told.flatMap((answer) => (!answer.fallback && answer.items) || [])) largest = Math.max(largest, row.score || 0);
  told.forEach((answer, place) => show_(answers[place], answer, told[1 - place], place));
  if (told[0].run) describe(told[0]);
  at("command").hidden = !body;
  const token = sessionStorage.getItem("token") ? ` -H "Authorization: Bearer $TOKEN"` : "";
  const quoted = body && JSON.stringify(body).replaceAll("'", "'\\''");
  at("command").querySelector("pre").textContent = `curl ${location.origin}/retrieve${token} -d '${quoted}'`;
}

function show_(section, answer, other, place) {
  const rows = answer.items || [], scored = !answer.hint;
  const of = answer.run ? answer : place ? shadow : served;
  const time = answer.milliseconds ? `${Math.round(answer.milliseconds)} ms` : "";
  const parts = [element("h2", {}, shadow ? `${place ? "B" : "A"} · ${describedBy(of)}` : "Retrieved items", " ",
    element("span", { className: "quiet time" }, time))];
  if (answer.hint) parts.push(element("p", { className: "quiet" }, answer.hint));
  else if (answer.error) parts.push(element("p", { className: "error", role: "alert" }, answer.error));
  else if (!rows.length) parts.push(element("p", { className: "quiet" }, "No items are left."));
  const ranks = new Map(other && other.items ? other.items.map((row) => [row.id, row.rank]) : []);
  if (scored && ranks.size) {
    const both = rows.filter((row) => ranks.has(row.id)), same = both.filter((row) => ranks.get(row.id) === row.rank);
    parts.push(element("p", { className: "quiet" },
      `${both.length} of ${rows.length} are in both, ${same.length} of them at the same rank.`));
  }
  if (rows.length) {
    const scale = mostScore === null ? "" : ` of ${mostScore.toLocaleString("en-US")}`;
    const heads = ["#", "Item"].map((text) => element("th", { scope: "col" }, text));
    if (scored) heads.push(element("th", { scope: "col", className: "score" }, `Score${scale}`));
    const pictures = picturesOf(rows);
    parts.push(element("table", {}, element("thead", {}, element("tr", {}, ...heads)),
      element("tbody", {}, ...rows.map((row, at) => rowOf(row, at, pictures[at], ranks, scored, place)))));
  }
  section.replaceChildren(...parts);
}

function rowOf(row, place, picture, ranks, scored, isShadow) {
  const follow = element("button", { type: "button", title: "Add to the history" }, titleOf(row));
  follow.addEventListener("click", () => add(row));
  const marks = [], rank = row.rank || place + 1, there = ranks.get(row.id);
  if (scored && ranks.size && there !== rank) {
    const said = there === undefined ? `only in ${isShadow ? "B" : "A"}` : `${isShadow ? "A" : "B"}: ${there}`;
    marks.push(element("span", { className: "mark" }, said));
  }
  const name = nameOf(row, follow, ...marks, ...valuesOf(row), ...reasons(row.why));
  const cells = [element("td", {}, String(rank)),
    element("td", {}, element("div", { className: "what" }, ...picture, name))];
  if (scored) {
    const bar = element("div", { className: "bar" });
    const share = Math.max(row.score, 0) / (mostScore === null ? largest || 1 : mostScore);
    bar.style.width = `${100 * Math.min(share, 1)}%`;
    cells.push(element("td", { className: "score" }, row.score.toFixed(3), element("div", { className: "track" }, bar)));
  }
  return element("tr", { className: ranks.size && there === undefined ? "only" : "" }, ...cells);
}

// The items of the history that are most like this one, and the products of components that make up its score.
function reasons(why) {
  if (!why) return [];
  const lines = why.similar.map((item) => `${titleOf(item)} ${item.cosine.toFixed(2)}`);
  const parts = why.components.map((of) => `(${of.query}, ${of.item}) ${of.score.toFixed(2)}`);
  const told = [];
  if (lines.length) told.push(element("div", {}, `Most like: ${lines.join(", ")}`));
  if (parts.length) told.push(element("div", {}, `Components of query and item: ${parts.join(", ")}`));
  return told.length ? [element("details", { className: "why" }, element("summary", {}, "Why"), ...told)] : [];
}

const describedBy = (about) => `run ${about.run}, step ${about.step}`;

function describe(about) {
  served = { ...served, ...about };
  const count = served.num_items ? ` · ${served.num_items.toLocaleString("en-US")} items of ${served.dataset}` : "";
  at("export").textContent = `${describedBy(served)}${count}`;
}

async function begin() {
  const about = await ask("healthz");
  describe(about);
  shadow = about.shadow;
  answers[1].hidden = !shadow;
  document.querySelector("main").classList.toggle("compared", Boolean(shadow));
  const { columns, most_score } = await ask("items?limit=1");
  mostScore = most_score;
  const kinds = Object.entries(columns);
  at("filters").hidden = !kinds.length;
  at("kinds").textContent = `Columns: ${kinds.map(([name, kind]) => `${name} (${kind})`).join(", ")}`;
}

query.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(search, 120); });
query.addEventListener("click", search);
query.addEventListener("blur", () => show(false));
query.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    if (suggestions.hidden) search();
    else {
      const step = event.key === "ArrowDown" ? 1 : -1;
      selected = Math.min(Math.max(selected + step, 0), found.length - 1);
      mark();
    }
  } else if (event.key === "Enter" && !suggestions.hidden && found[selected]) {
    event.preventDefault();
    add(found[selected]);
  } else if (event.key === "Escape") {
    show(false);
  }
});
for (const id of ["k", "where", "others"]) at(id).addEventListener("change", retrieve);
begin().catch(() => {}).then(retrieve);
