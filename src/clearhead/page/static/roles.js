// The roles of heads: what each means, its sign, and the sentence about one head.
import { el, shown, whole } from "./util.js";

/** @type {Record<string, string>} */
export const ROLES = {
  sink: "rests on one fixed token, often the first",
  previous: "looks one token back",
  induction: "looks at what followed this token last time",
  duplicate: "looks at other copies of this token",
  self: "looks at the token itself",
  aligned: "follows the other text from its start to its end",
  local: "looks 2 to 8 tokens away",
  broad: "spreads over the whole text",
  other: "no score passes its threshold",
};

/** @type {Record<string, string>} */
const IN_IMAGES = {
  sink: "rests on one fixed patch or special token",
  self: "looks at the patch itself",
  local: "looks at patches one or two away",
  broad: "spreads over the whole image",
};

const GROUND = '<path d="M1 1V13H13Z" fill="currentColor" opacity=".16"/>';
/** @type {Record<string, string>} */
const SIGNS = {
  sink: GROUND + '<path d="M2 2.6V13" stroke="currentColor" stroke-width="2.2"/>',
  previous: GROUND + '<path d="M1 4.2L9.8 13" stroke="currentColor" stroke-width="1.9"/>',
  induction: GROUND + '<path d="M1 8L6 13" stroke="currentColor" stroke-width="2.2"/>',
  duplicate:
    GROUND +
    '<g fill="currentColor"><circle cx="3.2" cy="8.2" r="1.4"/><circle cx="6.6" cy="11.4" r="1.4"/><circle cx="2.8" cy="12" r="1.1"/></g>',
  self: GROUND + '<path d="M1 1L13 13" stroke="currentColor" stroke-width="2"/>',
  aligned:
    '<path d="M1 1H13V13H1Z" fill="currentColor" opacity=".16"/><path d="M1 1L13 13" stroke="currentColor" stroke-width="2"/>',
  local: GROUND + '<path d="M1 3.2L10.8 13H6L1 8Z" fill="currentColor"/>',
  broad: '<path d="M1 1V13H13Z" fill="currentColor" opacity=".8"/>',
  other:
    GROUND +
    '<g fill="currentColor"><circle cx="5.6" cy="10" r="1.2"/><circle cx="2.8" cy="6" r="1"/><circle cx="9.4" cy="11.6" r="1"/></g>',
};

/**
 * What the rows and columns of a map are: one text, two, or an image.
 * @param {import("./types").Text} queries
 * @param {import("./types").Text} keys
 * @returns {"text" | "cross" | "image"}
 */
export const kindOf = (queries, keys) => (queries !== keys ? "cross" : queries.image ? "image" : "text");
const OF_KIND = { cross: ["sink", "aligned", "broad", "other"], image: ["sink", "self", "local", "broad", "other"] };
/** @param {"text" | "cross" | "image"} kind */
export const rolesOf = (kind) =>
  kind === "text" ? Object.keys(ROLES).filter((role) => role !== "aligned") : OF_KIND[kind];
/** @param {"text" | "cross" | "image"} kind @param {string} role */
export const meaning = (kind, role) => (kind === "image" && IN_IMAGES[role]) || ROLES[role];

/** @param {string} role */
export const roleName = (role) => (role in ROLES ? role : "other");

export function glyph(role, size = 14) {
  const box = el("span", { class: "glyph", "aria-hidden": "true", style: `color:var(--${roleName(role)})` });
  box.innerHTML = `<svg width="${size}" height="${size}" viewBox="0 0 14 14">${SIGNS[roleName(role)]}</svg>`;
  return box;
}

// The score, with what a head would get that spreads evenly.
/** @param {import("./types").Head} head @param {string} name */
function share(head, name) {
  const base = head.baselines[name];
  return whole(head.scores[name]) + (base == null ? "" : ` (uniform: ${whole(base)})`);
}

// One sentence that says what the head does, with its score and the uniform head's.
/** @param {import("./types").Trace} facts @param {import("./types").Layer} layer @param {import("./types").Head} head */
export function sentence(facts, layer, head) {
  const [queries, keys] = [layer.queries, layer.keys].map((text) => facts.texts[text]),
    kind = kindOf(queries, keys),
    word = kind === "image" ? "patch" : "token";
  const score = (name) => share(head, name);
  const sinks = [...new Set(layer.sinks.map((s) => `“${shown(keys.tokens[s])}”`))].slice(0, 3).join(" and ");
  const said = {
    sink: `Rests on ${sinks || "the first token"} whatever the query: ${score("sink")} of its attention`,
    previous: `Looks one token back: ${score("previous")} of its attention`,
    induction: `Looks at what followed the query token last time: ${score("induction")} of repeated tokens’ attention`,
    duplicate: `Looks at ${layer.causal ? "earlier" : "other"} copies of the query token: ${score("duplicate")} of repeated tokens’ attention`,
    aligned: `Follows the other text from its start to its end: ${score("aligned")} of its attention`,
    self: `Looks at the query ${word} itself: ${score("self")} of its attention`,
    local: `Looks ${kind === "image" ? "at patches one or two" : "2 to 8 tokens"} ${layer.causal ? "back" : "away"}: ${score("local")} of its attention`,
  }[head.role];
  if (said) return said + ".";
  if (head.role === "broad")
    return `Spreads out: entropy ${nats(head)}, ${whole(head.scores.broad)} of the most it could have.`;
  const near = Object.entries(head.scores).filter(([name, x]) => name !== "broad" && x != null);
  near.sort((a, b) => Number(b[1]) - Number(a[1]));
  const closest = near.slice(0, 2).map(([name, x]) => `${name} ${whole(x)}`);
  return "No score passes its threshold." + (closest.length ? ` Closest: ${closest.join(", ")}.` : "");
}

/** @param {import("./types").Head} head */
export const nats = (head) => (head.entropy == null ? "–" : head.entropy.toFixed(2) + " nats");
