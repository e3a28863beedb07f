"use strict";
const at = (id) => document.getElementById(id);

// Titles, ids and values come from data that nobody has checked: they only ever become text.
function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const query = at("query"), suggestions = at("suggestions"), answers = document.querySelectorAll(".answer");
const history_ = [];
let found = [], searches = 0, requests = 0, timer = 0, served = {}, shadow = null;
const HINT = "Add items to the history to see what the model retrieves after them.";
const POPULAR = `${HINT} These have the most actions:`;

const titleOf = (item) => item.title || item.id;
const describedBy = (about) => `run ${about.run}, step ${about.step}`;

// The item with its id and the values of its columns; a click adds it to the history.
function nameOf(item, ...more) {
  const follow = element("button", { type: "button", title: "Add to the history" }, titleOf(item));
  follow.addEventListener("click", () => add(item));
  const id = item.title ? [element("span", { className: "id" }, item.id)] : [];
  const values = Object.entries(item.columns || {}).map(([column, value]) => `${column} ${value}`.slice(0, 80));
  const shown = values.length ? [element("span", { className: "values" }, values.join(" · "))] : [];
  return element("span", { className: "name" }, follow, ...id, ...shown, ...more);
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

async function search() {
  const turn = ++searches;
  let items = [], note = "No such item.";
  try {
    const answer = await ask(`items?limit=20&query=${encodeURIComponent(query.value.trim())}`);
    items = answer.items;
    if (items.length) note = answer.more ? "There are more: type on." : "";
  } catch (error) {
    note = error.message;
  }
  if (turn !== searches) return;
  found = items;
  const rows = found.map((item) => element("li", {}, nameOf(item)));
  suggestions.replaceChildren(...rows, element("li", { className: "quiet" }, note));
  suggestions.hidden = false;
}

function close() {
  ++searches;
  query.value = "";
  suggestions.hidden = true;
}

function add(item) {
  history_.push(item);
  close();
  changed();
}

function changed() {
  at("history").replaceChildren(...history_.map((item, place) => {
    const remove = element("button", { className: "remove", type: "button" }, "×");
    remove.setAttribute("aria-label", `Remove ${titleOf(item)}`);
    remove.addEventListener("click", () => {
      history_.splice(place, 1);
      changed();
    });
    return element("li", {}, element("span", { className: "number" }, String(place + 1)), nameOf(item), remove);
  }));
  retrieve();
}

function request() {
  const body = { history: history_.map((item) => item.id), k: Number(at("k").value) };
  if (at("where").value.trim()) body.where = at("where").value.trim();
  return { ...body, ...JSON.parse(at("others").value.trim() || "{}") };
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
    told = [{ error: `The other entries are not JSON: ${error.message}` }];
  }
  if (turn !== requests) return;
  // Without a history, an export that does not say what is popular has no answer.
  const asked = body && (body.history.length || body.user || body.where);
  for (const answer of told) answer.hint = answer.fallback ? POPULAR : body && !asked && answer.error ? HINT : "";
  told.forEach((answer, place) => show(answers[place], answer, told[1 - place], place));
  if (told[0].run) describe(told[0]);
  at("command").hidden = !body;
  const token = sessionStorage.getItem("token") ? ` -H "Authorization: Bearer $TOKEN"` : "";
  const quoted = body && JSON.stringify(body).replaceAll("'", "'\\''");
  at("command").querySelector("pre").textContent = `curl ${location.origin}/retrieve${token} -d '${quoted}'`;
}

function show(section, answer, other, place) {
  const rows = answer.items || [], of = answer.run ? answer : place ? shadow : served;
  const time = answer.milliseconds ? `${Math.round(answer.milliseconds)} ms` : "";
  const parts = [element("h2", {}, shadow ? `${place ? "B" : "A"} · ${describedBy(of)}` : "Retrieved items", " ",
    element("span", { className: "quiet time" }, time))];
  if (answer.hint) parts.push(element("p", { className: "quiet" }, answer.hint));
  else if (answer.error) parts.push(element("p", { className: "error", role: "alert" }, answer.error));
  else if (!rows.length) parts.push(element("p", { className: "quiet" }, "No items are left."));
  if (other && other.items && rows.length) {
    const ids = new Set(other.items.map((row) => row.id));
    const both = rows.filter((row) => ids.has(row.id)).length;
    parts.push(element("p", { className: "quiet" }, `${both} of ${rows.length} are in both.`));
  }
  const heads = ["#", "Item", "Score"].map((text) => element("th", { scope: "col" }, text));
  const lines = rows.map((row) => element("tr", {}, element("td", {}, String(row.rank)),
    element("td", {}, nameOf(row, ...reasons(row.why))),
    element("td", { className: "score" }, row.score.toFixed(3))));
  if (rows.length) {
    parts.push(element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...lines)));
  }
  section.replaceChildren(...parts);
}

// The items of the history that are most like this one, and the products of components that make up its score.
function reasons(why) {
  const lines = why ? why.similar.map((item) => `${titleOf(item)} ${item.cosine.toFixed(2)}`) : [];
  const parts = why ? why.components.map((of) => `(${of.query}, ${of.item}) ${of.score.toFixed(2)}`) : [];
  const told = [];
  if (lines.length) told.push(element("div", {}, `Most like: ${lines.join(", ")}`));
  if (parts.length) told.push(element("div", {}, `Components of query and item: ${parts.join(", ")}`));
  return told.length ? [element("details", { className: "why" }, element("summary", {}, "Why"), ...told)] : [];
}

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
  const kinds = Object.entries((await ask("items?limit=1")).columns);
  at("filters").hidden = !kinds.length;
  at("kinds").textContent = `Columns: ${kinds.map(([name, kind]) => `${name} (${kind})`).join(", ")}`;
}

query.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(search, 120); });
query.addEventListener("click", search);
query.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !suggestions.hidden && found.length) add(found[0]);
  else if (event.key === "Escape") close();
});
for (const id of ["k", "where", "others"]) at(id).addEventListener("change", retrieve);
begin().catch(() => {}).then(retrieve);
