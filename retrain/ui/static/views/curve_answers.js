// @ts-nocheck
// The answers of /api/curves for one chart: the whole line, and a finer one of the part in sight. What is known is drawn at
// once, only another question is asked, and the newest answer alone counts.

import {get, gone, newest} from "../api.js";

export class CurveAnswers {
  // draw() is called when body() has become another, fail(error, retry) where an answer does not come.
  constructor(draw, fail) {
    Object.assign(this, {draw, fail, about: "", part: "", question: null, bodies: new Map(), old: new Set(), flying: null, took: 0, next: newest()});
  }

  // question: {at, key, x, smooth}; zoom: [from, to] in units of the x axis, or null for all of it.
  ask(question, zoom) {
    const about = JSON.stringify(question), part = zoom ? zoom.join(",") : "";
    if (about !== this.about) { this.bodies.clear(); this.old.clear(); }
    Object.assign(this, {about, part, question: zoom ? {...question, from: zoom[0], to: zoom[1]} : question});
    if (this.body()) this.draw();
    if (this.exact() && !this.old.has(part)) this.rest();
    else if (this.flying !== about + part) this.read();
  }

  // The answer to what was asked last, once it is there.
  exact() {
    return this.bodies.get(this.part) || null;
  }

  // That answer; until it comes the whole line, or the part that was in sight before.
  body() {
    return this.exact() || this.bodies.get("") || [...this.bodies.values()][0] || null;
  }

  async read() {
    const {about, part} = this, start = performance.now();
    this.flying = about + part;
    try {
      const body = await get("curves", this.question, this.next());
      for (const other of [...this.bodies.keys()]) if (other && other !== part) this.bodies.delete(other);
      this.bodies.set(part, body);
      this.old.delete(part);
      this.took = performance.now() - start;
      this.flying = null;
      this.draw();
    } catch (error) {
      if (gone(error)) return;
      this.flying = null;
      this.fail(error, () => this.read());
    }
  }

  // Rows came: what is known is out of date, and stays in sight until it is read again.
  expire() {
    for (const part of this.bodies.keys()) this.old.add(part);
  }

  // The same question once more.
  again() {
    this.expire();
    if (this.question) this.read();
  }

  // Nothing is waited for any more; what is known stays known.
  rest() {
    this.next.stop();
    this.flying = null;
  }
}
