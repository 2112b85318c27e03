// A client with grpc-go: client PROTOS ADDRESSES [SERVICE_CONFIG]. It runs jobs from standard input;
// tests/support/grpc_clients/program.py describes the lines.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"baton.test/client/batonv1"
)

const maxLineBytes = 64 << 20

type job struct {
	ID          int               `json:"id"`
	Method      string            `json:"method"`
	Request     json.RawMessage   `json:"request"`
	TimeoutS    float64           `json:"timeoutS"`
	Metadata    map[string]string `json:"metadata"`
	LeaveAfter  int               `json:"leaveAfter"`
	CancelAfter int               `json:"cancelAfter"`
	Retries     int               `json:"retries"`
}

type result struct {
	ID       int               `json:"id"`
	Code     codes.Code        `json:"code"`
	Details  string            `json:"details"`
	Trailers map[string]string `json:"trailers"`
	Left     bool              `json:"left,omitempty"`
}

type client struct {
	stub   batonv1.GenerationServiceClient
	output sync.Mutex
}

func (c *client) write(line interface{}) {
	data, err := json.Marshal(line)
	check(err)
	c.output.Lock()
	defer c.output.Unlock()
	fmt.Println(string(data))
}

func (c *client) writeMessage(id int, message proto.Message) {
	data, err := protojson.Marshal(message)
	check(err)
	c.write(map[string]interface{}{"id": id, "message": json.RawMessage(data)})
}

func (c *client) run(j job) {
	answer := c.attempt(j)
	for retries := j.Retries; retries > 0 && answer.Code == codes.Unavailable; retries-- {
		c.write(map[string]interface{}{"id": j.ID, "retry": answer.Details})
		answer = c.attempt(j)
	}
	c.write(answer)
}

func (c *client) attempt(j job) result {
	ctx, cancel := context.WithCancel(context.Background())
	if j.TimeoutS > 0 {
		ctx, cancel = context.WithTimeout(ctx, time.Duration(j.TimeoutS*float64(time.Second)))
	}
	ctx = metadata.NewOutgoingContext(ctx, metadata.New(j.Metadata))
	request := &batonv1.GenerateRequest{}
	check(protojson.Unmarshal(j.Request, request))
	var trailers metadata.MD
	var err error
	left := false
	if j.Method == "Generate" {
		var response *batonv1.GenerateResponse
		response, err = c.stub.Generate(ctx, request, grpc.Trailer(&trailers))
		if err == nil {
			c.writeMessage(j.ID, response)
		}
	} else {
		left, err = c.stream(ctx, cancel, j, request, &trailers)
	}
	if !left {
		cancel()
	}
	return answerOf(j.ID, err, trailers, left)
}

// stream reads until the end, an error, or as many messages as the job wants.
func (c *client) stream(ctx context.Context, cancel func(), j job, request *batonv1.GenerateRequest,
	trailers *metadata.MD) (bool, error) {
	stream, err := c.stub.GenerateStream(ctx, request)
	if err != nil {
		return false, err
	}
	for read := 1; ; read++ {
		message, err := stream.Recv()
		if err != nil {
			*trailers = stream.Trailer()
			if err == io.EOF {
				err = nil
			}
			return false, err
		}
		c.writeMessage(j.ID, message)
		if read == j.LeaveAfter {
			return true, nil
		}
		if read == j.CancelAfter {
			cancel()
		}
	}
}

func answerOf(id int, err error, trailers metadata.MD, left bool) result {
	texts := map[string]string{}
	for name, values := range trailers {
		texts[name] = strings.Join(values, ",")
	}
	known := status.Convert(err)
	return result{id, known.Code(), known.Message(), texts, left}
}

func dial(addresses string, serviceConfig string) *grpc.ClientConn {
	list := manual.NewBuilderWithScheme("list")
	state := resolver.State{}
	for _, address := range strings.Split(addresses, ",") {
		state.Addresses = append(state.Addresses, resolver.Address{Addr: address})
	}
	list.InitialState(state)
	options := []grpc.DialOption{grpc.WithInsecure(), grpc.WithResolvers(list)}
	if serviceConfig != "" {
		options = append(options, grpc.WithDefaultServiceConfig(serviceConfig))
	}
	connection, err := grpc.Dial("list:///router", options...)
	check(err)
	return connection
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	serviceConfig := ""
	if len(os.Args) > 3 {
		serviceConfig = os.Args[3]
	}
	connection := dial(os.Args[2], serviceConfig)
	c := &client{stub: batonv1.NewGenerationServiceClient(connection)}
	var running sync.WaitGroup
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, maxLineBytes)
	for lines.Scan() {
		var j job
		check(json.Unmarshal(lines.Bytes(), &j))
		running.Add(1)
		go func() {
			defer running.Done()
			c.run(j)
		}()
	}
	running.Wait()
}
