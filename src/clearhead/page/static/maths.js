// Formulas as MathML, and numbers rounded for them. MathML is text here: letters and numbers, never a token.

const named = (kind) => (kind ? ` class="${kind}"` : "");
export const mi = (letter, kind = "") => `<mi${named(kind)}>${letter}</mi>`;
export const mn = (number, kind = "") => `<mn${named(kind)}>${number}</mn>`;
export const mo = (sign) => `<mo form="infix">${sign}</mo>`; // with space around, at the start of a line too
const fence = (sign, form) => `<mo form="${form}">${sign}</mo>`;
export const bold = (letter, kind = "") => `<mi mathvariant="normal"${named(kind)}>${letter}</mi>`;
export const sub = (letter, index, kind = "") => `<msub${named(kind)}>${letter}${index}</msub>`;
export const vector = (letter, i, kind = "") => sub(bold(letter), mn(i), kind);
export const over = (above, below) => `<mfrac><mrow>${above}</mrow><mrow>${below}</mrow></mfrac>`;
export const root = (x) => `<msqrt>${x}</msqrt>`;
export const power = (exponent) => `<msup>${mi("e")}<mrow>${exponent}</mrow></msup>`;
export const sumOver = (index) => `<munder>${mo("∑")}${mi(index)}</munder>`;
export const length = (x) =>
  `<mo stretchy="false" rspace="0">‖</mo>${x}<mo stretchy="false" lspace="0">‖</mo>`;
export const sideBySide = (...parts) =>
  `<mrow>${fence("[", "prefix")}${parts.join("")}${fence("]", "postfix")}</mrow>`;
// A part of a line: the line may break after it.
export const piece = (...parts) => `<math displaystyle="true"><mrow>${parts.join("")}</mrow></math> `;
// One that is left out where the line is too narrow.
export const spare = (...parts) => `<span class="spare">${piece(...parts)}</span>`;

// Numbers in brackets: a row of them, or rows under one another.
/** @param {string[][]} rows @param {string} kind */
export function matrix(rows, kind = "") {
  const row = (texts) => `<mtr>${texts.map((text) => `<mtd>${mn(text, kind)}</mtd>`).join("")}</mtr>`;
  return `<mtable>${rows.map(row).join("")}</mtable>`; // its brackets are borders: few fonts have any that stretch
}

const minus = (text) => text.replace("-", /[1-9]/.test(text) ? "−" : "");
/** @param {number} x @param {number} places */
export const decimal = (x, places) => minus(x.toFixed(places));
export const trimmed = (x, places) => decimal(x, places).replace(/\.?0+$/, "");
export const signed = (text) => (text[0] === "−" ? text : "+" + text);
/** @param {string} text @param {string} kind */
export const bracketed = (text, kind = "") =>
  text[0] === "−" ? fence("(", "prefix") + mn(text, kind) + fence(")", "postfix") : mn(text, kind);
export const factor = (x, places, kind = "") => bracketed(trimmed(x, places), kind);
/** @param {string[]} texts */
export const summed = (texts) =>
  texts.map((t, i) => (i ? mo(t[0] === "−" ? "−" : "+") + mn(t.replace("−", "")) : mn(t))).join("");

// x ≥ 0 to three digits.
/** @param {number} x @param {string} kind */
export function digits(x, kind = "") {
  const [mantissa, power] = x.toExponential(2).split("e"),
    exponent = Number(power);
  if (exponent > -5 && exponent < 5) return mn(x.toFixed(Math.max(0, 2 - exponent)), kind);
  const tens = `<msup>${mn(10)}${mn(minus(String(exponent)))}</msup>`;
  return `<mrow${named(kind)}>${mn(mantissa)}${mo("×")}${tens}</mrow>`;
}

// Numbers rounded so that they add up to their rounded sum: those that would lose most are rounded up.
/** @param {number[]} numbers @param {number} sum @param {number} places */
export function addingUp(numbers, sum, places) {
  const units = numbers.map((x) => x * 10 ** places),
    down = units.map(Math.floor);
  const missing = Math.round(Number(sum.toFixed(places)) * 10 ** places) - down.reduce((a, b) => a + b, 0);
  const losing = [...units.keys()].sort((a, b) => units[b] - down[b] - (units[a] - down[a]));
  for (const i of losing.slice(0, Math.max(0, missing))) down[i]++;
  return down.map((x) => decimal(x / 10 ** places, places));
}

// The last of some terms, so that they add up to a sum as they are shown.
/** @param {string} sum @param {string[]} terms @param {number} places */
export function lastTerm(sum, terms, places) {
  const units = (text) => Math.round(Number(text.replace("−", "-")) * 10 ** places);
  return decimal((units(sum) - terms.reduce((total, text) => total + units(text), 0)) / 10 ** places, places);
}
