// A client of an app, typed by what `openapi-typescript` makes of /openapi.json; run against a real server by test_typescript_client.py.
import createClient from "openapi-fetch";
import type { paths } from "./api.js";

type Body = NonNullable<paths["/v1/functions/score"]["post"]["requestBody"]>["content"]["application/json"];
type Answer = paths["/v1/functions/score"]["post"]["responses"]["200"]["content"]["application/json"];

const good: Body = { box: { x: 1, label: "a" } };
const found: Answer = { value: 1, box: { x: 1, label: "" } };
// @ts-expect-error x is a number
const bad: Body = { box: { x: "1" } };

const url = process.argv[2]!;
const client = createClient<paths>({ baseUrl: url });

const scored = await client.POST("/v1/functions/score", { body: { box: { x: 20, label: "cat" }, factor: 2 } });
if (scored.data === undefined) throw new Error(JSON.stringify(scored.error));
const value: number = scored.data.value;

const refused = await client.POST("/v1/functions/score", { body: bad });
const problem = refused.error;

const streamed = await fetch(`${url}/v1/functions/counts/events?to=3`);
const events = (await streamed.text()).split("\n").filter(line => line.startsWith("data: ")).map(line => JSON.parse(line.slice(6)));

console.log(JSON.stringify({
  value,
  label: scored.data.box.label,
  status: refused.response.status,
  code: problem?.code,
  detail: problem?.detail,
  events,
  typed: [good, found].length,
}));
