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

const texts = {
  "date-time": "2026-01-01T12:00:00Z", date: "2026-01-01", time: "12:00:00Z", duration: "PT1H", uri: `${location.origin}/`,
  uuid: "00000000-0000-4000-8000-000000000000", email: "a@example.com", ipv4: "192.0.2.1", ipv6: "2001:db8::1", decimal: "1.5",
};

const least = (schema, usual) => {
  const low = schema.minimum ?? (schema.exclusiveMinimum !== undefined ? schema.exclusiveMinimum + 1 : usual);
  return Math.min(Math.max(low, usual), schema.maximum ?? (schema.exclusiveMaximum ?? Infinity) - 1);
};

// A value that fits, so that a body can be sent as it stands there: what is required, and of a choice the first.
const example = (schema, schemas, depth = 0) => {
  if (!schema || depth > 6) return null;
  if (schema.$ref) return example(schemas[schema.$ref.split("/").pop()], schemas, depth + 1);
  if (schema.default !== undefined) return schema.default;
  if (schema.const !== undefined) return schema.const;
  if (schema.enum) return schema.enum[0];
  const choices = schema.anyOf || schema.oneOf || schema.allOf;
  if (choices) return example(choices[0], schemas, depth + 1);
  switch (schema.type) {
    case "object": {
      const wanted = new Set(schema.required || []);
      const entries = Object.entries(schema.properties || {}).filter(([name]) => wanted.has(name));
      return Object.fromEntries(entries.map(([name, inner]) => [name, example(inner, schemas, depth + 1)]));
    }
    case "array":
      if (schema.prefixItems) return schema.prefixItems.map((inner) => example(inner, schemas, depth + 1));
      return schema.items ? Array(Math.max(1, schema.minItems || 0)).fill(example(schema.items, schemas, depth + 1)) : [];
    case "string": return schema.contentEncoding === "base64" ? "aGVsbG8=" : texts[schema.format] || "text";
    case "integer": return least(schema, 1);
    case "number": return least(schema, 1.5);
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
