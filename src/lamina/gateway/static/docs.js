"use strict";
// One form for each function and workflow, made from /openapi.json. Whatever the server says is shown as text.

const element = (name, text, parent) => {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (parent) parent.append(made);
  return made;
};

const headers = (more) => {
  const token = document.getElementById("token").value;
  return { ...more, ...(token ? { authorization: `Bearer ${token}` } : {}) };
};

const example = (schema, schemas, depth = 0) => {
  if (!schema || depth > 6) return null;
  if (schema.$ref) return example(schemas[schema.$ref.split("/").pop()], schemas, depth + 1);
  if (schema.default !== undefined) return schema.default;
  if (schema.enum) return schema.enum[0];
  if (schema.anyOf) return example(schema.anyOf[0], schemas, depth + 1);
  switch (schema.type) {
    case "object": {
      const wanted = new Set(schema.required || []);
      const entries = Object.entries(schema.properties || {}).filter(([name]) => wanted.has(name));
      return Object.fromEntries(entries.map(([name, inner]) => [name, example(inner, schemas, depth + 1)]));
    }
    case "array": return schema.items ? [example(schema.items, schemas, depth + 1)] : [];
    case "string": return schema.contentEncoding === "base64" ? "aGVsbG8=" : "text";
    case "integer": return 1;
    case "number": return 1.5;
    case "boolean": return true;
    default: return null;
  }
};

const show = async (answer, place, took) => {
  place.replaceChildren();
  element("p", `${answer.status} ${answer.statusText}, ${Math.round(took)} ms, ${answer.headers.get("lamina-slice") || "no slice"}`, place);
  const kind = answer.headers.get("content-type") || "";
  if (kind.startsWith("image/") && !kind.includes("svg")) {
    const blob = await answer.blob();
    element("p", `${kind}, ${blob.size} bytes`, place);
    return;
  }
  let text = await answer.text();
  try { text = JSON.stringify(JSON.parse(text), null, 2); } catch { /* shown as it is */ }
  element("pre", text.slice(0, 100000), place);
};

const describe = (path, operation, schemas, parent) => {
  const box = element("details", "", parent);
  const title = element("summary", "", box);
  element("code", `POST ${path}`, title);
  element("span", operation.summary || "", title);
  const schema = operation.requestBody?.content?.["application/json"]?.schema;
  const input = element("textarea", "", box);
  input.setAttribute("aria-label", `Body of ${path}`);
  input.value = JSON.stringify(example(schema, schemas), null, 2);
  const send = element("button", "Send", box);
  const place = element("div", "", box);
  send.addEventListener("click", async () => {
    const began = performance.now();
    try {
      const answer = await fetch(path, {
        method: "POST", body: input.value, headers: headers({ "content-type": "application/json" }),
      });
      await show(answer, place, performance.now() - began);
    } catch (error) {
      place.replaceChildren();
      element("pre", String(error), place);
    }
  });
  const about = element("details", "", box);
  element("summary", "Schema", about);
  const result = operation.responses?.["200"]?.content?.["application/json"]?.schema;
  element("pre", JSON.stringify({ body: schema, result }, null, 2), about);
};

const load = async () => {
  const place = document.getElementById("targets");
  const answer = await fetch("/openapi.json", { headers: headers({}) });
  place.replaceChildren();
  if (!answer.ok) {
    element("p", answer.status === 401 ? "This server asks for a token." : `${answer.status} ${answer.statusText}`, place);
    return;
  }
  const found = await answer.json();
  for (const [path, about] of Object.entries(found.paths)) {
    if (about.post && /^\/v1\/(functions|workflows)\//.test(path)) describe(path, about.post, found.components.schemas, place);
  }
};

document.getElementById("token").addEventListener("change", load);
load();
