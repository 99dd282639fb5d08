// The shapes that the modules hand to one another, for the type checker alone.

export interface Head {
  layer: number;
  head: number;
  role: string; // null while a live page has not read the head
  scores: Record<string, number | null>;
  baselines: Record<string, number | null>;
  entropy: number | null;
  distance: number | null;
  thumb?: Uint8Array;
}

// What the rows or the columns of a map stand for.
export interface Text {
  tokens: string[];
  n: number;
  name: string; // "source" or "target" of an encoder-decoder model, else empty
  prompt?: number; // tokens from here on are the model's own
  image?: Picture;
}

// An image that is read in patches, row by row; of the tokens, the first patch is number `first`.
export interface Picture {
  uri: string;
  rows: number;
  columns: number;
  first: number;
}

export type Side = "" | "encoder" | "decoder" | "cross";

export interface Layer {
  layer: number;
  heads: number;
  causal: boolean;
  sinks: number[];
  side: Side; // of an encoder-decoder model
  queries: number; // which of the texts
  keys: number;
  thumb: [number, number];
  groups: number; // key heads
  d?: number; // these where the weights follow from q and k
  scale?: number;
}

export interface Trace {
  name: string;
  texts: Text[];
  n: number; // tokens of the longest
  nbytes: number;
  denseNbytes: number;
  layers: Layer[];
  heads: Head[];
  scores: string[];
  opening: [number, number];
  threshold: number;
  notes: string[];
  exact: number;
  influence?: boolean; // whether there is a part of that name
  byName: Map<string, Head>;
  byLayer: Map<number, Layer>;
  find(layer: number, head: number): Head;
  readThumbs(): Promise<void>;
  renew(facts: any): void;
  weights(head: Head): Promise<Weights>;
  pages?: (string | number)[]; // what they are called, with the number of this one among them
  page?: number;
  prefix: string; // of the names of its parts
  part: Source["part"];
  reading: number; // layers of a live page that are not read yet
  hear(): Promise<boolean>;
}

// Where parts come from: a file, a server, a notebook's kernel. Null where there is no part of that name.
export interface Source {
  live: boolean;
  facts(page?: string): Promise<any>;
  part(name: string, query?: Record<string, any>, signal?: AbortSignal): Promise<Uint8Array | null>;
}

// Everything a pane may ask about one head.
export interface Weights {
  name: string; // layer.head
  rows: number;
  columns: number;
  causal: boolean;
  floor: number;
  exact: boolean;
  sees(query: number, key: number): boolean;
  at(query: number, key: number): number;
  row(query: number): Float32Array;
  column(key: number): Float32Array;
  each(visit: (query: number, key: number, weight: number) => void): void;
  need(rows: number[], columns: number[]): Promise<void> | null;
  picture(
    firstQuery: number,
    endQuery: number,
    firstKey: number,
    endKey: number,
    side: number,
    signal?: AbortSignal,
  ): Float32Array | Promise<Float32Array>;
  q: Float32Array | any; // null where the vectors are not here; then there are none of the following either
  d: number;
  scale: number;
  k: Float32Array;
  v: Float32Array;
  lse: Float32Array;
  terms: Uint8Array | null;
  part: Source["part"];
}

export type Direction = "from" | "to";
export type Mode = "text" | "columns";
export type Tab = "derivation" | "matrix";
export type Scale = "linear" | "root" | "log";

export interface View {
  trace: Trace;
  head: Head;
  weights: Weights;
  direction: Direction;
  token: number;
  other: number;
  pinned: boolean;
  hover: number | null;
  hoverOther: number | null;
  mode: Mode;
  sheet: boolean;
  wide: boolean;
  zoom: { x: number; y: number; size: number } | null;
  tab: Tab;
  scale: Scale;
  lines: boolean;
  fade: boolean;
  influence: Float32Array | null;
  filter: Set<string>;
  theme: "auto" | "light" | "dark";
  singleKeys: boolean;
  beside: number | null;
}

// The exact numbers behind one weight.
export interface Numbers {
  query: number;
  key: number;
  d: number;
  dv: number;
  scale: number;
  byRoot: boolean;
  pairs: [number, number][];
  dot: number;
  score: number;
  scores: Float64Array;
  lse: number;
  weight: number;
  seen: number;
  row: number[];
  z: Float64Array;
  value(key: number): Float32Array;
  norm(key: number): number;
  share(key: number): number;
}

export interface Product {
  index: number;
  factor: number;
  weight: number;
}

export interface InputNumber {
  place: number;
  product: number;
  partner: number;
  its: number;
  cos: number;
  sin: number;
  bias: number;
  products: Product[];
}

export interface OutputNumber {
  place: number;
  added: number;
  others: number;
  bias: number;
  total: number;
  products: Product[];
}

export interface ProjectFacts {
  why?: string; // if q is not known, the only entry
  of: string[];
  same: string[];
  inputs: number;
  places: Record<string, number>;
  products: number;
  turn: "" | "turn" | "factor";
  bias: boolean;
}

export interface OutputFacts {
  why?: string;
  same?: boolean;
  width: number;
  places: number;
  products: number;
  bias: boolean;
}

export interface Terms {
  project: ProjectFacts;
  output: OutputFacts;
  of(name: string, token: number): InputNumber[]; // none where they are not known
  out(token: number): OutputNumber[];
}

// What a step shows: a hint beside its name, and markup.
export type Step = [hint: string, markup: string];
