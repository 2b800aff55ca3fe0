// Java's own client against a gateway: `java JavaClient.java URL MODEL`. Its first request to an
// http: address asks for HTTP/2 by "Upgrade: h2c".

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.time.Duration;

public class JavaClient {
    private static HttpResponse<String> post(
            HttpClient client, String url, HttpRequest.BodyPublisher body) throws Exception {
        HttpRequest request = HttpRequest.newBuilder(URI.create(url + "/chat/completions"))
                .header("Content-Type", "application/json")
                .timeout(Duration.ofSeconds(60))
                .POST(body)
                .build();
        return client.send(request, HttpResponse.BodyHandlers.ofString());
    }

    private static void check(boolean holds, HttpResponse<String> answer) {
        if (!holds) {
            throw new AssertionError(answer.statusCode() + " " + answer.body());
        }
    }

    public static void main(String[] arguments) throws Exception {
        String url = arguments[0];
        String fixed = "{\"model\": \"" + arguments[1] + "\", \"temperature\": 0, \"max_tokens\": 8, "
                + "\"messages\": [{\"role\": \"user\", \"content\": \"Who are you?\"}]";
        HttpClient client = HttpClient.newHttpClient();
        for (int i = 0; i < 2; i++) {
            var whole = post(client, url, HttpRequest.BodyPublishers.ofString(fixed + "}"));
            check(whole.statusCode() == 200 && whole.body().contains("\"content\""), whole);
        }
        byte[] bytes = (fixed + ", \"stream\": true}").getBytes("UTF-8");
        // A publisher of unknown length sends the body in chunks.
        var chunked = HttpRequest.BodyPublishers.fromPublisher(
                HttpRequest.BodyPublishers.ofByteArray(bytes));
        var stream = post(HttpClient.newHttpClient(), url, chunked);
        check(stream.statusCode() == 200 && stream.body().contains("data: [DONE]"), stream);
        System.out.println("java " + System.getProperty("java.version") + ": ok");
    }
}
