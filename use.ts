import type { paths } from "./api";
type Body = NonNullable<paths["/v1/functions/score"]["post"]["requestBody"]>["content"]["application/json"];
type Answer = paths["/v1/functions/score"]["post"]["responses"]["200"]["content"]["application/json"];
const good: Body = { box: { x: 1, label: "a" } };
const found: Answer = { value: 1, box: { x: 1, label: "" } };
// @ts-expect-error x is a number
const bad: Body = { box: { x: "1" } };
export { good, found, bad };
