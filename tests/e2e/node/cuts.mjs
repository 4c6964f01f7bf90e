// What node's own clients see when a stream is cut, and what they do when the caller leaves; one JSON object.
// Usage: node cuts.mjs cut|leave PLAIN_BASE HTTPS_BASE
import { connect } from "node:http2";

const [what, plain, secure] = process.argv.slice(2);
const body = JSON.stringify({ model: "lab-small", stream: true, messages: [{ role: "user", content: "why?" }] });
const headers = { "content-type": "application/json", authorization: "Bearer sk-lab" };

async function byFetch(base) {
  const leaving = new AbortController();
  const seen = { status: 0, events: 0, ended: false, error: "" };
  try {
    const options = { method: "POST", body, headers, signal: leaving.signal };
    const answer = await fetch(`${base}/v1/chat/completions`, options);
    seen.status = answer.status;
    for await (const chunk of answer.body) {
      seen.events += Buffer.from(chunk).toString().split("data: ").length - 1;
      if (what === "leave") leaving.abort();
    }
    seen.ended = true;
  } catch (error) {
    seen.error = `${error.name}: ${error.message}`;
  }
  return seen;
}

async function byHttp2(base) {
  const url = new URL(`${base}/v1/chat/completions`);
  const session = connect(url.origin);
  const seen = { status: 0, events: 0, ended: false, error: "", code: 0 };
  const stream = session.request({ ":method": "POST", ":path": url.pathname, ...headers });
  stream.on("response", (fields) => (seen.status = fields[":status"]));
  stream.on("end", () => (seen.ended = stream.rstCode === 0));
  stream.on("error", (error) => (seen.error = error.code));
  stream.on("data", (chunk) => {
    seen.events += chunk.toString().split("data: ").length - 1;
    if (what === "leave") stream.close(8); // CANCEL
  });
  stream.end(body);
  await new Promise((resolve) => stream.on("close", resolve));
  seen.code = stream.rstCode;
  session.close();
  return seen;
}

console.log(JSON.stringify({ plain: await byFetch(plain), secure: await byFetch(secure), h2: await byHttp2(secure) }));
