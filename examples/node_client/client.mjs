// A streaming client in Node, with grpc-js. It reads the .proto files when it starts, so nothing is
// generated. From this folder:
//
//   npm install
//   node client.mjs [ADDRESS [PROMPT]]
//
// PROTOS names the folder protos/ of the repository, if it is elsewhere. BATON_API_KEY is sent, if it
// is set. Ctrl-C cancels the request.
import { fileURLToPath } from 'node:url';

import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const [address = '127.0.0.1:50051', prompt = 'Open the file'] = process.argv.slice(2);
const protos = process.env.PROTOS ?? fileURLToPath(new URL('../../protos', import.meta.url));

const definition = protoLoader.loadSync('baton/v1/generation.proto', {
  includeDirs: [protos],
  defaults: true, // unset fields are "" or 0, not undefined
  enums: String,
  longs: String, // numbers of 64 bits, such as a seed, do not fit into a number of JavaScript
});
const { GenerationService } = grpc.loadPackageDefinition(definition).baton.v1;
const client = new GenerationService(address, grpc.credentials.createInsecure());

const request = {
  text: prompt,
  sampling: { temperature: 0.7, seed: '1' },
  stopping: { maxTokens: 16 },
};
const metadata = new grpc.Metadata();
if (process.env.BATON_API_KEY) {
  metadata.set('authorization', `Bearer ${process.env.BATON_API_KEY}`);
}
const call = client.GenerateStream(request, metadata, { deadline: Date.now() + 60_000 });
process.on('SIGINT', () => call.cancel()); // leaving the loop with `break` would not cancel

try {
  for await (const message of call) {
    process.stdout.write(message.text);
    if (message.finishReason !== 'FINISH_REASON_UNSPECIFIED') {
      process.stdout.write(`\nfinished: ${message.finishReason}\n`);
    }
    if (message.usage) {
      console.log(`tokens: ${message.usage.completionTokens}`);
    }
  }
} catch (error) {
  console.error(`\n${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
} finally {
  client.close();
}
