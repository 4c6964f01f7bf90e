// Run every call of the vendors' node packages against one base URL and print what came of each, one JSON object.
// Usage: node calls.mjs BASE UPLOAD_BYTES   (BASE is where /v1/... lives)
import { createHash } from "node:crypto";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI, { toFile } from "openai";
import { OpenAIRealtimeWS } from "openai/realtime/ws";

const [base, uploadBytes] = [process.argv[2], Number(process.argv[3])];
const openai = new OpenAI({ baseURL: `${base}/v1`, apiKey: "sk-lab", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: base, apiKey: "sk-lab", maxRetries: 0 });
const messages = [{ role: "user", content: "why does water fall?" }];
const chat = { model: "lab-small", messages };
const digest = (bytes) => createHash("sha256").update(bytes).digest("hex");
const picture = Buffer.alloc(200_000, "picture");

const calls = {
  async chat() {
    return (await openai.chat.completions.create(chat)).choices[0].message.content;
  },
  async chatStream() {
    let [text, chunks] = ["", 0];
    const options = { stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await openai.chat.completions.create({ ...chat, ...options })) {
      text += chunk.choices[0]?.delta.content ?? "";
      chunks += 1;
    }
    return { text, chunks };
  },
  async responses() {
    return (await openai.responses.create({ model: "lab-small", input: "why does water fall?" })).output_text;
  },
  async responsesStream() {
    const kinds = [];
    for await (const event of await openai.responses.create({ model: "lab-small", input: "why?", stream: true }))
      kinds.push(event.type);
    return kinds;
  },
  async messages() {
    return (await anthropic.messages.create({ ...chat, max_tokens: 100 })).content;
  },
  async messagesStream() {
    const stream = anthropic.messages.stream({ ...chat, max_tokens: 100 });
    const kinds = [];
    stream.on("streamEvent", (event) => kinds.push(event.type));
    const final = await stream.finalMessage();
    return { kinds, content: final.content, reason: final.stop_reason };
  },
  async models() {
    return [(await openai.models.list()).data.map((model) => model.id), (await anthropic.models.list()).data.length];
  },
  async embeddings() {
    return (await openai.embeddings.create({ model: "text-embedding-lab", input: ["one", "two"] })).data;
  },
  async upload() {
    const file = await toFile(Buffer.alloc(uploadBytes, "headrace"), "notes.jsonl");
    const made = await openai.files.create({ file, purpose: "batch" });
    const content = Buffer.from(await (await openai.files.content(made.id)).arrayBuffer());
    return { made, bytes: content.length, content: digest(content) };
  },
  async pictures() {
    const drawn = await openai.images.generate({ model: "lab-draws", prompt: "a mill" });
    const image = await toFile(picture, "mill.png", { type: "image/png" });
    const edited = await openai.images.edit({ model: "lab-draws", image, prompt: "more water" });
    return [drawn, edited].map((each) => digest(each.data[0].b64_json));
  },
  async sounds() {
    const spoken = await openai.audio.speech.create({ model: "lab-speaks", voice: "alloy", input: "water" });
    const file = await toFile(picture, "river.mp3", { type: "audio/mpeg" });
    const heard = await openai.audio.transcriptions.create({ model: "lab-hears", file });
    return [digest(Buffer.from(await spoken.arrayBuffer())), heard.text];
  },
  async realtime() {
    const session = new OpenAIRealtimeWS({ model: "lab-small" }, openai);
    const kinds = [];
    await new Promise((resolve, reject) => {
      session.on("error", reject);
      session.socket.on("error", reject);
      session.on("event", (event) => {
        kinds.push(event.type);
        if (event.type === "session.created") {
          const item = { type: "message", role: "user", content: [{ type: "input_text", text: "hello" }] };
          session.send({ type: "conversation.item.create", item });
          session.send({ type: "response.create" });
        }
        if (event.type === "response.done") resolve();
      });
    });
    const closed = new Promise((resolve) => session.socket.on("close", (code) => resolve(code)));
    session.close({ code: 1000, reason: "done" });
    return { kinds, code: await closed };
  },
  async refused() {
    const failures = [];
    for (const call of [
      () => openai.chat.completions.create({ model: "lab-small", messages: [] }),
      () => openai.get("/nowhere"),
      () => anthropic.messages.create({ model: "lab-small", max_tokens: 1, messages: [] }),
    ])
      await call().catch((error) => failures.push([error.constructor.name, error.status, error.error]));
    return failures;
  },
  async left() {
    const stream = await openai.chat.completions.create({ ...chat, stream: true });
    for await (const chunk of stream) if (chunk.choices[0]?.delta.content) break;
    return stream.controller.signal.aborted;
  },
};

const results = {};
for (const [name, call] of Object.entries(calls))
  results[name] = await call().catch((error) => `${error.constructor.name}: ${error.message} ${error.cause ?? ""}`);
console.log(JSON.stringify(results));
