# A client with the gem grpc: client.rb PROTOS ADDRESS. It runs jobs from standard input, one after
# the other; tests/support/grpc_clients/program.py describes the lines.
require 'json'
require 'baton/v1/generation_services_pb'


def write(line)
  puts JSON.generate(line)
  $stdout.flush
end

def write_message(id, message)
  write(id: id, message: JSON.parse(message.to_json))
end

def attempt(stub, job)
  request = Baton::V1::GenerateRequest.decode_json(JSON.generate(job['request']))
  options = { metadata: job['metadata'] || {} }
  options[:deadline] = Time.now + job['timeoutS'] if job['timeoutS']
  if job['method'] == 'Generate'
    write_message(job['id'], stub.generate(request, **options))
  else
    stub.generate_stream(request, **options).each { |message| write_message(job['id'], message) }
  end
  { code: 0, details: '', trailers: {} }
rescue GRPC::BadStatus => e
  { code: e.code, details: e.details, trailers: e.metadata }
end

stub = Baton::V1::GenerationService::Stub.new(ARGV[1], :this_channel_is_insecure)
$stdin.each_line do |line|
  job = JSON.parse(line)
  write({ id: job['id'] }.merge(attempt(stub, job)))
end
